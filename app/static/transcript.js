// What was said, as data: the protocol's events of one stream after the other go in, utterances on the page's own clock
// come out. No DOM, no clock, no network; docs/protocol.md describes the events.
//
// An utterance is {id, startMs, endMs, committed, tentative, text, words, language, state}; its state goes
//   open → final | failed                   the stream answered
//   open → waiting → open                   the stream broke, and the next one hears the same words again
//   open → waiting → unfinished             … or it never does: what was shown is kept
// and a "gap" is a place where audio was lost.

const REACH_MS = 1_500; // how far the next stream's idea of where speech begins may be from the last one's

export class Transcript {
  // `changed(utterance, what)` is told of each change: "added", "changed", "settled" or "removed".
  constructor(changed = () => {}) {
    this.changed = changed;
    this.utterances = [];
    this.open = new Map(); // "stream utterance" → its utterance
    this.waiting = new Set();
    this.nextId = 0;
  }

  get settled() {
    return this.utterances.filter(({ state, text }) => text && state !== "open" && state !== "waiting");
  }

  // Where the first words stand that are shown and not settled; null where all are.
  unsettledFromMs() {
    const unsettled = [...this.open.values(), ...this.waiting];
    return unsettled.length ? Math.min(...unsettled.map(({ startMs }) => startMs)) : null;
  }

  // An event of the stream `stream`, whose audio begins at `originMs` of the page's clock.
  receive(event, stream, originMs) {
    const key = `${stream} ${event.utterance}`;
    switch (event.type) {
      case "speech_started": return this.#begin(key, originMs + event.at_ms);
      case "partial": return this.#revise(key, event, originMs);
      case "final": return this.#settle(key, event, originMs, "final");
      case "failed": return this.#settle(key, event, originMs, "failed");
      case "lag": return this.#giveUpBefore(originMs + event.audio_ms - event.lag_ms);
    }
  }

  // The stream is gone: what it has not settled waits for the next one to hear it again.
  detach() {
    for (const [key, utterance] of this.open) {
      this.open.delete(key);
      if (!shown(utterance)) this.#remove(utterance);
      else this.#wait(utterance);
    }
  }

  // No further stream will come.
  finish() {
    this.detach();
    this.#giveUpBefore(Infinity);
  }

  gap(startMs, endMs) {
    const seconds = Math.round((endMs - startMs) / 1000);
    this.#add({ startMs, endMs, text: "", note: `${seconds} s were not heard`, state: "gap" });
  }

  clear() {
    this.utterances = this.utterances.filter(({ state }) => state === "open" || state === "waiting");
  }

  #begin(key, startMs) {
    const again = [...this.waiting].find((old) => old.startMs - REACH_MS <= startMs && startMs <= old.endMs + REACH_MS);
    if (!again) return this.open.set(key, this.#add({ startMs, endMs: startMs, state: "open" }));
    this.waiting.delete(again); // its text stays until the first one of the new stream
    again.state = "open";
    this.open.set(key, again);
  }

  #revise(key, { start_ms, end_ms, committed, tentative }, originMs) {
    const utterance = this.#find(key, originMs + start_ms);
    if (!committed && !tentative.trim()) return;
    Object.assign(utterance, { startMs: originMs + start_ms, endMs: originMs + end_ms, committed, tentative });
    this.changed(utterance, "changed");
  }

  #settle(key, event, originMs, state) {
    const utterance = this.#find(key, originMs + event.start_ms);
    this.open.delete(key);
    for (const old of this.waiting) { // said again by this one
      if (old.startMs < originMs + event.end_ms) this.#remove(old);
    }
    const words = (event.words ?? []).map(({ word, start_ms, end_ms, probability }) =>
      ({ word, startMs: originMs + start_ms, endMs: originMs + end_ms, probability }));
    Object.assign(utterance, {
      startMs: originMs + event.start_ms, endMs: originMs + event.end_ms, committed: "", tentative: "",
      text: event.text ?? "", words, language: event.language, confidence: event.confidence, state,
    });
    if (state === "failed") utterance.note = `not transcribed: ${event.message}`;
    if (state === "final" && !utterance.text) this.#remove(utterance);
    else this.changed(utterance, "settled");
  }

  #giveUpBefore(endMs) {
    for (const utterance of this.waiting) {
      if (utterance.endMs + REACH_MS >= endMs) continue;
      this.waiting.delete(utterance);
      const text = `${(utterance.committed + utterance.tentative).trim()} …`;
      Object.assign(utterance, { text, committed: "", tentative: "", state: "unfinished" });
      this.changed(utterance, "settled");
    }
  }

  #find(key, startMs) {
    if (!this.open.has(key)) this.#begin(key, startMs);
    return this.open.get(key);
  }

  #wait(utterance) {
    utterance.state = "waiting";
    utterance.tentative = utterance.committed + utterance.tentative; // the next stream owes it nothing
    utterance.committed = "";
    this.waiting.add(utterance);
    this.changed(utterance, "changed");
  }

  #add(fields) {
    const utterance = { id: this.nextId++, committed: "", tentative: "", text: "", words: [], ...fields };
    this.utterances.push(utterance);
    this.changed(utterance, "added");
    return utterance;
  }

  #remove(utterance) {
    this.waiting.delete(utterance);
    const index = this.utterances.lastIndexOf(utterance); // one of the last few
    if (index >= 0) this.utterances.splice(index, 1);
    this.changed(utterance, "removed");
  }
}

export function shown({ committed, tentative }) {
  return (committed + tentative).trim() !== "";
}
