// The tab "Files": one file at a time is sent to /v1/audio/transcriptions and read while it is being transcribed.
import { EventReader } from "./events.js";
import { minutes } from "./formats.js";
import { address, headers } from "./key.js";
import { Reader } from "./reader.js";
import { copyOnClick, downloadOnClick } from "./save.js";

const WRONG_KEY = 401;

export class Files {
  constructor($, { needKey }) {
    Object.assign(this, { $, needKey, job: null, file: null, segments: [] });
    this.reader = new Reader($("file-lines"), $("player"));
    $("file").onchange = ({ target }) => { this.transcribe(target.files[0]); target.value = ""; };
    $("file-cancel").onclick = () => (this.job ? this.cancel() : this.transcribe(this.file));
    $("player").onerror = () => { $("player").hidden = true; };
    $("player").onloadedmetadata = () => { $("player").hidden = false; };
    copyOnClick($("file-copy"), () => this.segments);
    downloadOnClick($("file-toolbar"), () => this.segments, () => this.file.name.replace(/\.[^.]*$/, ""));
  }

  transcribe(file) {
    if (!file) return;
    this.cancel();
    this.#open(file);
    const job = this.job = new XMLHttpRequest(), events = new EventReader();
    const ours = (react) => (event) => this.job === job && react(event);
    job.open("POST", address(this.$("file-translate").checked ? "v1/audio/translations" : "v1/audio/transcriptions"));
    for (const [name, value] of Object.entries(headers())) job.setRequestHeader(name, value);
    job.upload.onprogress = ours(({ loaded, total }) => this.#progress(`Uploading … ${percent(loaded / total)}`, loaded / total));
    job.upload.onload = ours(() => this.#progress("Transcribing …", null));
    job.onprogress = ours(() => job.status === 200 && this.#take(events.take(job.responseText)));
    job.onload = ours(() => this.#answered(job, events));
    job.onerror = ours(() => this.#failed("The service cannot be reached."));
    job.send(this.#form(file));
  }

  cancel() {
    if (!this.job) return;
    this.job.abort();
    this.job = null;
    this.#rest("Cancelled", this.segments.length > 0);
  }

  #form(file) {
    const { $ } = this, form = new FormData();
    form.append("stream", "true"); // before the file, so that the service knows it early
    form.append("response_format", "json");
    if ($("file-language").value) form.append("language", $("file-language").value);
    if ($("file-hotwords").value.trim()) form.append("hotwords", $("file-hotwords").value);
    form.append("file", file);
    return form;
  }

  #open(file) {
    const { $ } = this, player = $("player");
    this.file = file;
    this.segments = [];
    this.reader.clear();
    this.#complain("");
    if (player.src) URL.revokeObjectURL(player.src);
    player.hidden = true; // until it turns out that the browser can play it
    player.src = URL.createObjectURL(file);
    $("file-name").textContent = file.name;
    $("file-card").hidden = false;
    $("file-lines").hidden = $("file-toolbar").hidden = true;
    $("file-cancel").textContent = "Cancel";
    this.#progress("Uploading …", 0);
  }

  #take(events) {
    for (const data of events) {
      if (data === "[DONE]") continue;
      const event = JSON.parse(data);
      if (event.error) this.problem = event.error.message;
      else if (event.type === "transcript.text.delta") this.#add(event.segment);
      else if (event.warnings?.length) this.#complain(event.warnings.join(" "));
    }
  }

  #add({ start, end, text, language, words = [] }) {
    if (!text.trim()) return;
    const segment = {
      startMs: start * 1000, endMs: end * 1000, text: text.trim(), language,
      words: words.map((word) => ({ word: word.word, startMs: word.start * 1000, endMs: word.end * 1000 })),
    };
    this.segments.push(segment);
    this.reader.add(segment);
    this.$("file-lines").hidden = false;
    const { duration } = this.$("player"), isKnown = Number.isFinite(duration) && duration > 0;
    const of = isKnown ? ` of ${minutes(duration * 1000)}` : "";
    this.#progress(`Transcribing … ${minutes(end * 1000)}${of}`, isKnown ? end / duration : null);
  }

  #answered(job, events) {
    if (job.status !== 200) return this.#refused(job);
    this.#take(events.take(`${job.responseText}\n\n`));
    this.job = null;
    if (this.problem) return this.#failed(this.problem);
    this.#rest(this.segments.length ? "Done" : "No speech was found in this file.", this.segments.length > 0);
  }

  #refused(job) {
    if (job.status === WRONG_KEY) this.needKey();
    let message = `The service answered with an error (${job.status}).`;
    try {
      message = JSON.parse(job.responseText).error.message;
    } catch { /* it came from something in between, and is not ours to read */ }
    this.#failed(message);
  }

  #failed(message) {
    this.job = this.problem = null;
    this.#rest("Not finished", this.segments.length > 0);
    this.#complain(message);
  }

  #complain(text) {
    this.$("file-problem").textContent = text;
    this.$("file-problem").hidden = !text;
  }

  #progress(text, share) {
    const { $ } = this, bar = $("file-progress");
    bar.hidden = false;
    bar.classList.toggle("unknown", share === null);
    if (share === null) bar.removeAttribute("aria-valuenow");
    else bar.ariaValueNow = Math.round(Math.min(1, share) * 100);
    bar.firstElementChild.style.transform = `scaleX(${share === null ? 1 : Math.min(1, share)})`;
    $("file-state").ariaLive = "off"; // each step of it need not be read out
    if ($("file-state").textContent !== text) $("file-state").textContent = text;
  }

  #rest(text, hasText) {
    const { $ } = this;
    $("file-progress").hidden = true;
    $("file-state").ariaLive = "polite";
    $("file-state").textContent = text;
    $("file-cancel").textContent = "Again";
    $("file-toolbar").hidden = !hasText;
    for (const button of $("file-toolbar").querySelectorAll("button")) button.disabled = !hasText;
  }
}

function percent(share) {
  return `${Math.floor(share * 100)} %`;
}
