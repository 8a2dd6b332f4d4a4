// Utterances → the text of a TXT, SRT, VTT or JSON file. Pure. Cues are cut as app/wire/subtitles.py cuts them, and a
// test compares the two.

const LINE_COLUMNS = 42, LONGEST_MS = 7_000, SHORTEST_MS = 800, GAP_MS = 1_500;
const SENTENCE_END = new Set(".!?…。！？।؟"), CLAUSE_END = new Set(",;:،、，；："), CLOSERS = /["'”’»)\]」』]+$/u;
const WIDE = /[\u1100-\u115f\u2e80-\u303e\u3041-\ua4cf\ua960-\ua97f\uac00-\ud7a3\uf900-\ufaff\ufe30-\ufe6f\uff01-\uff60\uffe0-\uffe6\u{1f300}-\u{1faff}\u{20000}-\u{3fffd}]/u;
const UNSPACED = new RegExp(`${WIDE.source}|[\\u0e00-\\u0eff]`, "u"); // and Thai and Lao
const COMBINING = /\p{M}/u;

export const FORMATS = {
  txt: { type: "text/plain", write: toText },
  srt: { type: "application/x-subrip", write: toSrt },
  vtt: { type: "text/vtt", write: toVtt },
  json: { type: "application/json", write: toJson },
};

export function toText(utterances) {
  return utterances.map(({ text }) => `${text}\n`).join("");
}

export function toJson(utterances) {
  const seconds = (ms) => Math.round(ms) / 1000;
  const segments = utterances.map(({ startMs, endMs, text, language, words }) => ({
    start: seconds(startMs), end: seconds(endMs), text, language,
    words: words.map((word) => ({ word: word.word, start: seconds(word.startMs), end: seconds(word.endMs) })),
  }));
  return JSON.stringify({ text: utterances.map(({ text }) => text).join(" "), segments }, null, 2) + "\n";
}

export function toSrt(utterances) {
  return cues(utterances).map(({ startMs, endMs, text }, i) =>
    `${i + 1}\n${clock(startMs, ",")} --> ${clock(endMs, ",")}\n${text.replaceAll("-->", "→")}\n`).join("\n");
}

export function toVtt(utterances) {
  const escaped = (text) => text.replaceAll("&", "&amp;").replaceAll("<", "&lt;").replaceAll(">", "&gt;");
  return ["WEBVTT\n", ...cues(utterances).map(({ startMs, endMs, text }) =>
    `${clock(startMs, ".")} --> ${clock(endMs, ".")}\n${escaped(text)}\n`)].join("\n");
}

// 83000 → "1:23", 3683000 → "1:01:23"
export function minutes(ms) {
  const s = Math.max(0, Math.floor(ms / 1000)), two = (n) => String(n).padStart(2, "0");
  return s < 3600 ? `${Math.floor(s / 60)}:${two(s % 60)}` : `${Math.floor(s / 3600)}:${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
}

// Each word with its place in the text, in order: [{from, to, startMs, endMs}], positions in UTF-16 units. A word that the
// text does not have (it was tidied up) is left out.
export function locate({ text, words }) {
  const found = [];
  let at = 0;
  for (const { word, startMs, endMs } of words) {
    const from = text.indexOf(word.trim(), at);
    if (from < 0 || !word.trim()) continue;
    at = from + word.trim().length;
    found.push({ from, to: at, startMs, endMs });
  }
  return found;
}

function clock(ms, point) {
  const total = Math.max(0, Math.round(ms)), pad = (n, width = 2) => String(n).padStart(width, "0");
  return `${pad(Math.floor(total / 3_600_000))}:${pad(Math.floor(total / 60_000) % 60)}:${pad(Math.floor(total / 1000) % 60)}${point}${pad(total % 1000, 3)}`;
}

function columns(text) {
  let sum = 0;
  for (const c of text) sum += COMBINING.test(c) ? 0 : WIDE.test(c) ? 2 : 1;
  return sum;
}

export function cues(utterances) {
  const drafts = [...utterances].sort((a, b) => a.startMs - b.startMs)
    .flatMap((utterance) => split(tokens(utterance)))
    .map((part) => ({ startMs: part[0].startMs, endMs: Math.max(...part.map((t) => t.endMs)), text: wrap(part) }));
  drafts.sort((a, b) => a.startMs - b.startMs);
  return drafts.map(({ startMs, endMs, text }, i) => {
    const nextMs = drafts[i + 1]?.startMs ?? Infinity;
    return { startMs, endMs: Math.max(Math.min(Math.max(endMs, startMs + SHORTEST_MS), nextMs), startMs + 1), text };
  });
}

// What is never torn apart: a word with its punctuation.
function tokens(utterance) {
  const located = locate(utterance), { text } = utterance;
  const pieces = located.length
    ? located.map(({ from, startMs, endMs }, i) => ({ // with the punctuation up to the next word
      raw: text.slice(i ? from : 0, located[i + 1]?.from ?? text.length), spaced: i > 0 && /\s/.test(text[from - 1]), startMs, endMs }))
    : spread(utterance);
  const kept = [];
  for (const { raw, spaced, startMs, endMs } of pieces) {
    const word = raw.trim().replace(/\s+/g, " "), last = kept.at(-1);
    if (!word) continue;
    if (last && !spaced && !breaksFreely(last.text.at(-1), word[0])) {
      last.text += word;
      last.endMs = Math.max(last.endMs, endMs);
    } else kept.push({ text: word, spaced, startMs, endMs: Math.max(startMs, endMs) });
  }
  return kept;
}

// Whether a line may end between two characters that no space separates: scripts written without spaces.
function breaksFreely(before, after) {
  return UNSPACED.test(before) && UNSPACED.test(after) && !SENTENCE_END.has(after) && !CLAUSE_END.has(after);
}

// A text without word times → its words, each as long as its share of the characters.
function spread({ text, startMs, endMs }) {
  let words = text.match(/\s*\S+/g) ?? [];
  if (words.length && words.length * 12 < text.length && UNSPACED.test(text.trim()[0])) words = [...text];
  const total = words.reduce((sum, word) => sum + word.length, 0) || 1;
  let done = 0;
  return words.map((raw) => {
    const from = startMs + ((endMs - startMs) * done) / total;
    done += raw.length;
    return { raw, spaced: /^\s/.test(raw), startMs: from, endMs: startMs + ((endMs - startMs) * done) / total };
  });
}

function join(part) {
  return part.map(({ text, spaced }, i) => (i && spaced ? " " : "") + text).join("");
}

// The tokens of each cue of one utterance: as few cues as fit, cut where reading pauses.
function split(all) {
  const parts = [];
  for (let rest = all; rest.length;) {
    let count = fitting(rest);
    if (count < rest.length && !(gapAfter(rest, count - 1) > GAP_MS)) count = bestCut(rest, count);
    parts.push(rest.slice(0, count));
    rest = rest.slice(count);
  }
  return parts;
}

function gapAfter(part, i) {
  return i + 1 < part.length ? part[i + 1].startMs - part[i].endMs : 0;
}

function fitting(part) {
  let lines = 1, width = columns(part[0].text);
  for (let i = 1; i < part.length; i++) {
    const own = columns(part[i].text);
    width += own + (part[i].spaced ? 1 : 0);
    if (width > LINE_COLUMNS) [lines, width] = [lines + 1, own];
    if (lines > 2 || part[i].endMs - part[0].startMs > LONGEST_MS || gapAfter(part, i - 1) > GAP_MS) return i;
  }
  return part.length;
}

function bestCut(part, fits) {
  const merit = (count) => {
    const last = part[count - 1].text.replace(CLOSERS, "").at(-1);
    return (SENTENCE_END.has(last) ? 3 : CLAUSE_END.has(last) ? 2 : 0) + (gapAfter(part, count - 1) > 300 ? 1 : 0);
  };
  let best = Math.max(1, Math.floor(fits / 3));
  for (let count = best + 1; count <= fits; count++) if (merit(count) >= merit(best)) best = count;
  return best;
}

// One line where it fits, else lines as even as can be.
function wrap(part) {
  if (columns(join(part)) <= LINE_COLUMNS || part.length === 1) return join(part);
  const longest = (count) => Math.max(columns(join(part.slice(0, count))), columns(join(part.slice(count))));
  let middle = 1;
  for (let count = 2; count < part.length; count++) if (longest(count) < longest(middle)) middle = count;
  return `${join(part.slice(0, middle))}\n${join(part.slice(middle))}`;
}
