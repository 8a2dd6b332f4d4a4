// A file's transcript beside its player: a click on a word plays from there, and the word that is heard is marked.
//
// A long recording has tens of thousands of words; only the paragraphs near the screen have an element for each.
import { locate, minutes } from "./formats.js";

export class Reader {
  constructor(lines, player) {
    Object.assign(this, { lines, player, paragraphs: [], marked: null });
    this.near = new IntersectionObserver((entries) => this.#came(entries), { root: lines, rootMargin: "400px" });
    lines.onclick = ({ target }) => this.#clicked(target);
    player.addEventListener("play", () => this.#follow());
    player.addEventListener("seeked", () => this.#mark());
  }

  add(segment) {
    const row = document.createElement("p"), time = document.createElement("button"), text = document.createElement("span");
    row.className = "row";
    time.type = "button";
    time.className = "quiet time";
    time.textContent = minutes(segment.startMs);
    time.ariaLabel = `Play from ${time.textContent}`;
    time.dataset.ms = segment.startMs;
    text.className = "text";
    text.dir = "auto";
    text.textContent = segment.text;
    row.append(time, text);
    this.lines.append(row);
    this.paragraphs.push({ segment, row, text, words: null });
    row.dataset.index = this.paragraphs.length - 1;
    this.near.observe(row);
  }

  clear() {
    this.near.disconnect();
    this.lines.replaceChildren();
    this.paragraphs = [];
    this.marked = null;
  }

  #came(entries) {
    for (const { target, isIntersecting } of entries) {
      const paragraph = this.paragraphs[target.dataset.index];
      if (!paragraph || isIntersecting === Boolean(paragraph.words)) continue;
      if (isIntersecting) this.#spell(paragraph);
      else this.#unspell(paragraph);
    }
  }

  #spell(paragraph) {
    const { segment } = paragraph, located = locate(segment), parts = [];
    let at = 0;
    paragraph.words = located.map(({ from, to, startMs, endMs }) => {
      const element = document.createElement("span");
      element.className = "word";
      element.dataset.ms = startMs;
      element.textContent = segment.text.slice(from, to);
      parts.push(segment.text.slice(at, from), element);
      at = to;
      return { element, startMs, endMs };
    });
    paragraph.text.replaceChildren(...parts, segment.text.slice(at));
  }

  #unspell(paragraph) {
    paragraph.words = null;
    paragraph.text.textContent = paragraph.segment.text;
  }

  #clicked(target) {
    const { ms } = target.closest("[data-ms]")?.dataset ?? {};
    if (ms === undefined || this.player.hidden || String(window.getSelection())) return;
    this.player.currentTime = ms / 1000;
    this.player.play();
  }

  #follow() {
    this.#mark();
    if (!this.player.paused && !this.player.ended) requestAnimationFrame(() => this.#follow());
  }

  #mark() {
    const ms = this.player.currentTime * 1000;
    const paragraph = lastBefore(this.paragraphs, ms, ({ segment }) => Math.min(segment.startMs, segment.words[0]?.startMs ?? Infinity));
    const word = paragraph?.words && lastBefore(paragraph.words, ms, ({ startMs }) => startMs);
    const now = word && ms < word.endMs + 300 ? word.element : null;
    if (now === this.marked) return;
    this.marked?.classList.remove("now");
    now?.classList.add("now");
    this.marked = now;
    this.#keepInSight(now);
  }

  #keepInSight(element) {
    if (!element) return;
    const { top, bottom } = element.getBoundingClientRect(), view = this.lines.getBoundingClientRect();
    if (bottom > view.bottom - 8 || top < view.top + 8) this.lines.scrollTop += top - view.top - view.height / 3;
  }
}

// The last item that begins at or before `ms`; they are in order.
function lastBefore(items, ms, begin) {
  let low = 0, high = items.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (begin(items[middle]) <= ms) low = middle + 1;
    else high = middle;
  }
  return items[low - 1];
}
