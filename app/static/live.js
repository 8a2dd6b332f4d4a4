// The tab "Live": the button, what is chosen, what is said about the state, and what can be done with the transcript.
import { minutes } from "./formats.js";
import { Recording } from "./recording.js";
import { copyOnClick, downloadOnClick } from "./save.js";
import { Transcript } from "./transcript.js";
import { TranscriptView } from "./view.js";

const PROBLEMS = {
  overloaded: "All places of this service are taken. Try again in a moment.",
  too_many_requests: "Too many attempts. Try again in a moment.",
  unreachable: "The service could not be reached any more. What was heard is above.",
  starting: "The service is still starting. Try again in a few seconds.",
};
const RECONNECTING = {
  overloaded: "All places of the service are taken; waiting for one …",
  starting: "The service is starting; waiting for it …",
  shutting_down: "The service is being restarted; reconnecting …",
};
const OFFERS = {
  ready: "Ready when you are", starting: "The service is starting …", draining: "The service is going down",
  key: "This service asks for a key", gone: "The service cannot be reached; still trying …",
};

export class Live {
  constructor($, { needKey, watch }) {
    Object.assign(this, { $, needKey, watch, recording: null, endMs: 0, levelDue: false });
    this.transcript = new Transcript();
    this.view = new TranscriptView(this.transcript, {
      lines: $("lines"), rows: $("rows"), earlier: $("earlier"), newest: $("newest"), hint: $("hint"), announcer: $("announcer"),
    });
    const changed = this.transcript.changed;
    this.transcript.changed = (utterance, what) => { changed(utterance, what); if (what === "settled") this.#enable(); };
    $("toggle").onclick = () => this.toggle();
    $("clear").onclick = () => { this.view.clear(); this.#enable(); };
    const toolbar = $("copy").closest(".toolbar");
    copyOnClick($("copy"), () => this.transcript.settled);
    downloadOnClick(toolbar, () => this.transcript.settled, () => "transcript");
    $("among").onchange = () => this.#choose();
    $("language").onchange = () => this.#showChoice();
    $("microphone").onchange = () => this.#switchMicrophone();
    navigator.mediaDevices?.addEventListener("devicechange", () => this.#listMicrophones());
    this.#listMicrophones();
  }

  // What the service says of itself while nothing is recorded.
  offer(status) {
    if (this.recording) return;
    this.$("toggle").disabled = status !== "ready";
    this.#say(OFFERS[status]);
  }

  toggle() {
    if (this.recording) return this.recording.stop();
    this.complain("");
    const recording = new Recording({
      transcript: this.transcript, config: this.#config(), deviceId: this.$("microphone").value, startMs: this.endMs,
      show: () => this.#show(recording), level: (peak) => this.#meter(peak), complain: (text) => this.complain(text),
      ended: (error) => this.#ended(recording, error),
    });
    this.recording = recording;
    this.view.toNewest();
    this.#show(recording);
    recording.start().then(() => this.#listMicrophones()); // their names are told once one was allowed
    navigator.wakeLock?.request("screen").then((lock) => { this.lock = lock; }, () => {}); // where it is to be had
  }

  abandon() {
    this.recording?.abandon();
  }

  retryNow() {
    this.recording?.retryNow();
  }

  complain(text) {
    const problem = this.$("problem");
    if (problem.textContent !== text) problem.textContent = text;
    problem.hidden = !text;
  }

  #ended(recording, error) {
    this.endMs = recording.nowMs;
    this.recording = null;
    this.lock?.release();
    this.#meter(0);
    for (const id of ["path", "time", "delay", "lag"]) this.$(id).textContent = "";
    this.$("toggle").dataset.state = "";
    this.$("toggle-text").textContent = "Start";
    this.$("options").disabled = false;
    if (error) this.complain(PROBLEMS[error.code] ?? error.message);
    if (error?.code === "key") this.needKey();
    this.#enable();
    this.watch();
  }

  // What is chosen -----------------------------------------------------------------------------------------------------

  #config() {
    const { $ } = this, hotwords = $("hotwords").value.split(",").map((word) => word.trim()).filter(Boolean);
    const config = { words: true };
    if ($("language").value) config.language = $("language").value;
    else if (this.#among().length) config.languages = this.#among();
    if ($("translate").checked) config.task = "translate";
    if (hotwords.length) config.hotwords = hotwords;
    return config;
  }

  #among() {
    return [...this.$("among-list").children].map((chip) => chip.dataset.code);
  }

  #choose() {
    const select = this.$("among"), code = select.value, name = select.selectedOptions[0].textContent;
    select.value = "";
    if (!code || this.#among().includes(code)) return;
    const chip = document.createElement("li"), remove = document.createElement("button");
    chip.dataset.code = code;
    remove.type = "button";
    remove.textContent = "×";
    remove.ariaLabel = `Remove ${name}`;
    remove.onclick = () => { chip.remove(); select.focus(); };
    chip.append(name, remove);
    this.$("among-list").append(chip);
  }

  #showChoice() {
    this.$("among-field").hidden = this.$("language").value !== "";
  }

  async #listMicrophones() {
    const select = this.$("microphone"), chosen = select.value;
    const devices = (await navigator.mediaDevices?.enumerateDevices().catch(() => [])) ?? [];
    const named = devices.filter(({ kind, deviceId, label }) => kind === "audioinput" && deviceId && deviceId !== "default" && label);
    select.replaceChildren(new Option("Default", ""), ...named.map(({ label, deviceId }) => new Option(label, deviceId)));
    select.value = named.some(({ deviceId }) => deviceId === chosen) ? chosen : "";
  }

  async #switchMicrophone() {
    if (!this.recording?.microphone?.node) return;
    try {
      await this.recording.choose(this.$("microphone").value);
    } catch (error) {
      this.complain(error.message);
    }
  }

  // What is shown ------------------------------------------------------------------------------------------------------

  #show(recording) {
    if (this.recording !== recording || recording.state === "ended") return;
    const { $ } = this, { state, link, stats, fault } = recording;
    $("toggle").disabled = false;
    $("toggle").dataset.state = state;
    $("toggle-text").textContent = state === "finishing" ? "End now" : "Stop";
    $("options").disabled = state !== "ended";
    this.#say({
      asking: "Waiting for the microphone …", connecting: "Connecting …", listening: "Listening",
      reconnecting: RECONNECTING[fault?.code] ?? "The connection was lost; reconnecting …", finishing: "Finishing …",
    }[state]);
    const listens = state === "listening" || state === "finishing";
    $("path").textContent = link?.isOpen && listens ? link.kind : "";
    $("path").title = link?.kind === "WebRTC" ? "Sound goes over WebRTC" : "Sound goes over a WebSocket";
    $("time").textContent = minutes(recording.nowMs - recording.startMs);
    $("delay").textContent = listens && stats.delayMs > 0 ? `text after ${tenths(stats.delayMs)} s` : "";
    $("lag").textContent = listens && stats.lagMs >= 0 ? `${tenths(stats.lagMs)} s behind` : "";
    $("lag").classList.toggle("much", stats.lagMs > 5_000);
  }

  #say(text) {
    const state = this.$("state");
    if (state.textContent !== text) state.textContent = text; // else it would be read out again
  }

  #meter(peak) {
    this.peak = peak;
    if (this.levelDue) return;
    this.levelDue = true;
    requestAnimationFrame(() => {
      this.levelDue = false;
      const level = Math.sqrt(Math.min(1, this.peak));
      this.$("level").style.transform = `scaleX(${level.toFixed(3)})`;
      this.$("meter").ariaValueNow = Math.round(level * 100);
    });
  }

  #enable() {
    const isEmpty = !this.transcript.utterances.some(({ text }) => text);
    for (const button of this.$("copy").closest(".toolbar").querySelectorAll("button")) button.disabled = isEmpty;
  }
}

function tenths(ms) {
  return (ms / 1000).toFixed(1);
}
