// The live transcript on the screen. However long the session, only some rows are elements: the newest ones while the
// reader follows, up to MOST where he has scrolled up to read; the others are data, and shown when asked for. An update
// touches its own row alone.
import { minutes } from "./formats.js";

const WINDOW = 200, SPARE = 50, MOST = 600, PAGE = 100; // rows
const NEAR_PX = 48;
const ANNOUNCED = 5;

export class TranscriptView {
  constructor(transcript, { lines, rows, earlier, newest, hint, announcer }) {
    Object.assign(this, { transcript, lines, rows, earlier, newest, hint, announcer });
    this.elements = new Map(); // id → row, in the order of the rows
    this.following = true;
    this.lastTop = this.lastHeight = 0;
    this.due = false;
    transcript.changed = (utterance, what) => this.#update(utterance, what);
    lines.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    earlier.onclick = () => this.#showEarlier();
    newest.onclick = () => this.toNewest();
  }

  toNewest() {
    this.following = true;
    this.rows.replaceChildren();
    this.elements.clear();
    for (const utterance of this.transcript.utterances.slice(-WINDOW)) this.#append(utterance);
    this.#later();
  }

  clear() {
    this.transcript.clear();
    this.announcer.replaceChildren();
    this.toNewest();
  }

  #update(utterance, what) {
    if (what === "added") {
      if (this.#isAtEnd(utterance)) this.#append(utterance);
    } else if (what === "removed") {
      this.elements.get(utterance.id)?.remove();
      this.elements.delete(utterance.id);
    } else if (this.elements.has(utterance.id)) fill(this.elements.get(utterance.id), utterance);
    if (what === "settled" && utterance.text) this.#announce(utterance.text);
    this.#later();
  }

  // Whether the row before this utterance's is there, and there is room for another.
  #isAtEnd({ id }) {
    const { utterances } = this.transcript, before = utterances[this.#indexOf(id) - 1];
    const room = this.following || this.elements.size < MOST;
    return room && (!before || this.elements.has(before.id));
  }

  #append(utterance) {
    const row = newRow(utterance);
    this.rows.append(row);
    this.elements.set(utterance.id, row);
    if (this.following && this.elements.size > WINDOW + SPARE) this.#dropFirst(SPARE);
  }

  #dropFirst(count) {
    for (const [id, row] of [...this.elements].slice(0, count)) {
      row.remove();
      this.elements.delete(id);
    }
  }

  #showEarlier() {
    const { utterances } = this.transcript, [first] = this.elements.keys();
    const end = first === undefined ? utterances.length : this.#indexOf(first);
    const older = utterances.slice(Math.max(0, end - PAGE), end);
    const height = this.lines.scrollHeight, top = this.lines.scrollTop;
    const added = older.map((utterance) => [utterance.id, newRow(utterance)]);
    this.rows.prepend(...added.map(([, row]) => row));
    const kept = [...added, ...this.elements];
    for (const [, row] of kept.slice(MOST)) row.remove();
    this.elements = new Map(kept.slice(0, MOST));
    this.following = false;
    this.lines.scrollTop = this.lastTop = top + this.lines.scrollHeight - height; // what was read stays where it is
    this.#refresh();
    if (this.earlier.hidden) this.lines.focus(); // the button that had it is gone
  }

  // Utterances are in the order of their ids.
  #indexOf(id) {
    const { utterances } = this.transcript;
    let low = 0, high = utterances.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (utterances[middle].id < id) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  #scrolled() {
    const { scrollTop, scrollHeight, clientHeight } = this.lines;
    if (scrollTop + clientHeight > scrollHeight - NEAR_PX) this.following = this.#showsNewest();
    else if (scrollTop < this.lastTop - 1 && scrollHeight >= this.lastHeight) this.following = false; // the reader did it
    this.lastTop = scrollTop;
    this.#later();
  }

  #showsNewest() {
    const last = this.transcript.utterances.at(-1);
    return !last || this.elements.has(last.id);
  }

  #later() {
    if (this.due) return;
    this.due = true;
    requestAnimationFrame(() => { this.due = false; this.#refresh(); });
  }

  #refresh() {
    const { utterances } = this.transcript;
    const [first] = this.elements.keys();
    this.hint.hidden = utterances.length > 0;
    this.earlier.hidden = first === undefined || first === utterances[0]?.id;
    for (const row of this.rows.querySelectorAll(":scope > .open")) reserve(row);
    if (this.following) {
      this.lines.scrollTop = this.lines.scrollHeight;
      this.lastTop = this.lines.scrollTop;
    }
    this.lastHeight = this.lines.scrollHeight; // where it has shrunk since, the browser may scroll up by itself
    this.newest.hidden = this.following;
  }

  #announce(text) {
    const line = document.createElement("p");
    line.textContent = text;
    this.announcer.append(line);
    while (this.announcer.children.length > ANNOUNCED) this.announcer.firstChild.remove();
  }
}

function newRow(utterance) {
  const row = document.createElement("p"), time = document.createElement("time"), text = document.createElement("span");
  const committed = document.createElement("span"), tentative = document.createElement("span");
  text.dir = "auto";
  text.className = "text";
  tentative.className = "tentative";
  committed.append("");
  tentative.append("");
  text.append(committed, tentative);
  row.append(time, text);
  fill(row, utterance);
  return row;
}

function fill(row, { startMs, committed, tentative, text, note, state }) {
  const [time, { children: [settled, open] }] = row.children;
  write(time.firstChild ?? time.appendChild(new Text()), minutes(startMs));
  const isOpen = state === "open" || state === "waiting";
  write(settled.firstChild, isOpen ? committed : text);
  write(open.firstChild, isOpen ? tentative || (committed ? "" : "…") : note ?? "");
  row.className = `row ${state}`;
  row.classList.toggle("open", isOpen);
  if (!isOpen) row.style.minHeight = "";
}

// Only what differs is written, so that what stands is not laid out anew and a selection in it survives.
function write(node, text) {
  if (node.data === text) return;
  let same = 0;
  while (same < text.length && text[same] === node.data[same]) same++;
  node.replaceData(same, node.length - same, text.slice(same));
}

// A line that a guess had filled stays, so that what follows does not jump when the guess gets shorter.
function reserve(row) {
  const height = row.offsetHeight;
  if (height > (Number.parseFloat(row.style.minHeight) || 0)) row.style.minHeight = `${height}px`;
}
