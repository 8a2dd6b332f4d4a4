// Server-sent events out of a growing text. Pure: give it the whole text so far, each time; it returns the new events'
// data. (An XMLHttpRequest is what can report an upload's progress, and this is how it shows an answer as it comes.)
export class EventReader {
  constructor() {
    this.read = 0;
  }

  take(text) {
    const events = [];
    for (let end; (end = text.indexOf("\n\n", this.read)) >= 0; this.read = end + 2) {
      const lines = text.slice(this.read, end).split("\n");
      const data = lines.filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) events.push(data.join("\n")); // else a comment, which keeps the connection open
    }
    return events;
  }
}
