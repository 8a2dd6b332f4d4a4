// One press of Start to the end of its Stop: microphone → link → transcript, over whatever becomes of the connection.
//
// The clock is the audio itself: a position is how much the microphone has given. Each link begins somewhere on that
// clock and counts from 0; the newest two minutes are kept, so that the next link is sent what the last one had not
// answered.
//
//   asking → connecting → listening ⇄ reconnecting → ended       stop() leads through finishing
import { LinkError, RtcLink, SocketLink } from "./links.js";
import { Microphone } from "./microphone.js";
import { AudioRing } from "./ring.js";

const RING_S = 120; // enough for a restart of the service with a large model; 4 MB
const RTC_MS = 3_000; // longer than this nobody waits for WebRTC
const RTC_TAIL_MS = 250; // what was said last is still on its way when Stop is pressed
const SILENT_MS = { WebRTC: 4_000, WebSocket: 10_000 }; // the service says something each second
const FINISH_MS = 20_000;
const RETRY_MS = [0, 300, 700, 1_500, 3_000, 5_000];
const PREROLL_MS = 300, TAIL_MS = 200; // audio before an utterance's start; after its end
const UNSENT_S = RING_S + 30; // more than this in the socket's buffer: the network does not carry it
const EARLY_PEAK = 0.08, EARLY_PIECES = 5; // 200 ms of something loud before WebRTC is up
const HOPELESS = ["bad_parameter", "unknown_parameter", "unknown_language", "key", "forbidden_origin"];
const BUSY = ["overloaded", "too_many_requests"];

let links = 0; // over all recordings: each link has a number of its own
let rtcFails = typeof RTCPeerConnection === "undefined"; // then it is not waited for again in this page

export class Recording {
  // `show` is called whenever `state`, `link`, `attempt` or `stats` have changed; `ended(error)` once, at the end.
  constructor({ transcript, config, deviceId, startMs, show, level, complain, ended }) {
    Object.assign(this, { transcript, config, deviceId, startMs, show, level, complain, ended });
    this.state = "asking";
    this.stats = {};
    this.attempt = 0;
    this.finalEndMs = this.coveredMs = startMs;
    this.early = 0;
    this.hasListened = this.stopping = false;
  }

  get nowMs() {
    return this.startMs + (this.ring ? (this.ring.end / this.ring.sampleRate) * 1000 : 0);
  }

  async start() {
    try {
      this.microphone = await Microphone.open(this.deviceId, (data) => this.#hear(data), () => this.#unplugged());
    } catch (error) {
      return this.#end(error);
    }
    if (this.state === "ended") return this.microphone.close(); // the page was left meanwhile
    this.timer = setInterval(() => this.#look(), 1_000);
    this.#to("connecting");
    if (rtcFails || !(await this.#overRtc())) this.#overSocket();
  }

  // Stop: what was said is transcribed to its end. Once more: at once.
  async stop() {
    if (this.stopping || this.state === "asking") return this.#end(null);
    this.stopping = true;
    this.finishBy = performance.now() + FINISH_MS;
    this.#to("finishing");
    if (this.link?.kind === "WebRTC") await new Promise((resolve) => setTimeout(resolve, RTC_TAIL_MS));
    await this.microphone.stop();
    if (this.link?.isOpen) this.link.send({ type: "eof" });
    else if (this.link?.kind === "WebRTC") this.link.close(); // still connecting: the socket takes all there is
  }

  // The page is left: nothing can be waited for.
  abandon() {
    this.#end(null);
  }

  async choose(deviceId) {
    await this.microphone.choose(deviceId);
    await this.link?.replaceTrack?.(this.microphone.track);
  }

  retryNow() {
    if (!this.retry) return;
    clearTimeout(this.retry);
    this.#overSocket();
  }

  // Audio -----------------------------------------------------------------------------------------------------------

  #hear({ pcm, peak }) {
    this.ring ??= new AudioRing(this.microphone.sampleRate, RING_S);
    this.ring.push(pcm);
    this.level(peak);
    if (this.state === "connecting" && peak > EARLY_PEAK) this.early += 1;
    if (!this.link?.isOpen) return;
    this.link.sendAudio(new Int16Array(pcm));
    if (this.link.unsentBytes > UNSENT_S * 2 * this.ring.sampleRate) this.#lost(new LinkError("unreachable"));
  }

  #unplugged() {
    this.complain("The microphone was unplugged or taken away.");
    this.stop();
  }

  // Links -----------------------------------------------------------------------------------------------------------

  #newLink(make) {
    let link = null;
    link = make({
      heard: (event) => this.link === link && this.#event(event, link),
      lost: (error) => this.link === link && this.#lost(error),
    });
    Object.assign(link, { number: links++, originMs: this.nowMs, origins: [], heardAt: performance.now() });
    this.link = link;
    return link;
  }

  // Whether WebRTC took it, or there is nothing more to try.
  async #overRtc() {
    const link = this.#newLink((handlers) => new RtcLink(this.microphone.track, handlers));
    const timer = setTimeout(() => { rtcFails = true; link.close(); }, RTC_MS);
    try {
      await link.open(this.config);
    } catch (error) {
      if (this.state === "ended") return true;
      if (!BUSY.includes(error.code) && !HOPELESS.includes(error.code)) return false;
      this.#end(error);
      return true;
    } finally {
      clearTimeout(timer);
    }
    if (this.link !== link) return true;
    link.originMs = this.nowMs;
    if (this.early < EARLY_PIECES) return true;
    link.close(); // somebody was already speaking; WebRTC could not take that, the socket can
    return false;
  }

  async #overSocket() {
    this.retry = null;
    const link = this.#newLink((handlers) => new SocketLink(handlers));
    this.show();
    try {
      await link.open({ ...this.config, sample_rate: this.microphone.sampleRate });
    } catch (error) {
      if (this.link === link) this.#lost(error);
      return;
    }
    this.#sendAgain(link);
  }

  // All that is not answered yet, as far as it is still there.
  #sendAgain(link) {
    const { ring } = this, perMs = (ring?.sampleRate ?? 0) / 1000;
    const wantedMs = this.#answeredMs();
    const position = ring ? Math.max(ring.start, Math.round((wantedMs - this.startMs) * perMs)) : 0;
    link.originMs = ring ? this.startMs + position / perMs : this.startMs;
    if (link.originMs > wantedMs + 500) this.transcript.gap(wantedMs, link.originMs);
    for (const samples of ring?.from(position) ?? []) link.sendAudio(samples);
    if (this.stopping) link.send({ type: "eof" });
  }

  #answeredMs() {
    const unsettledMs = this.transcript.unsettledFromMs();
    if (unsettledMs !== null) return Math.max(this.finalEndMs, unsettledMs - PREROLL_MS);
    return Math.max(this.finalEndMs + (this.finalEndMs > this.startMs ? TAIL_MS : 0), this.coveredMs - 1_000);
  }

  #lost(error) {
    this.link.close();
    if (this.state === "ended") return;
    const isOver = HOPELESS.includes(error.code) || (BUSY.includes(error.code) && !this.hasListened);
    if (isOver || (this.stopping && performance.now() > this.finishBy)) return this.#end(error);
    this.transcript.detach();
    this.fault = error;
    this.#to(this.stopping ? "finishing" : "reconnecting");
    const waitMs = RETRY_MS[Math.min(this.attempt, RETRY_MS.length - 1)];
    this.attempt += 1;
    this.retry = setTimeout(() => this.#overSocket(), waitMs * (1 + Math.random() / 4));
  }

  // Once a second. A link can die without a word.
  #look() {
    const silentMs = performance.now() - (this.link?.heardAt ?? 0);
    if (this.stopping && performance.now() > this.finishBy) return this.#end(new LinkError("unreachable"));
    if (!this.stopping && this.link?.isOpen && !this.link.ended && silentMs > SILENT_MS[this.link.kind]) {
      this.#lost(new LinkError("unreachable"));
    }
    this.show();
  }

  // Events ----------------------------------------------------------------------------------------------------------

  #event(event, link) {
    link.heardAt = performance.now();
    if (this.stopping) this.finishBy = link.heardAt + FINISH_MS;
    switch (event.type) {
      case "ready": return this.#ready(event, link);
      case "lag": this.#lag(event, link); break;
      case "partial": this.stats.delayMs = this.nowMs - link.originMs - event.end_ms; break;
      case "final": case "failed": this.finalEndMs = Math.max(this.finalEndMs, link.originMs + event.end_ms); break;
      case "error": return event.fatal || this.complain(event.message);
      case "done": if (this.stopping) return this.#end(null); break;
    }
    this.transcript.receive(event, link.number, link.originMs);
  }

  #ready(event, link) {
    this.attempt = 0;
    this.hasListened = true;
    this.fault = null;
    this.model = event.model;
    link.heardAt = performance.now();
    this.complain("");
    if (!this.stopping) this.#to("listening");
  }

  // Over WebRTC the service's clock starts with the first packet that reaches it. When that was follows from how much it
  // has heard by now; the least delayed of the last messages is nearest to the truth.
  #lag({ audio_ms, lag_ms }, link) {
    if (link.kind === "WebRTC") {
      link.origins = [...link.origins.slice(-9), this.nowMs - audio_ms];
      link.originMs = Math.max(this.startMs, Math.min(...link.origins));
    }
    this.coveredMs = link.originMs + audio_ms - lag_ms;
    this.stats.lagMs = Math.max(lag_ms, this.nowMs - link.originMs - audio_ms);
  }

  // State -----------------------------------------------------------------------------------------------------------

  #to(state) {
    if (this.state === "ended") return;
    this.state = state;
    this.show();
  }

  #end(error) {
    if (this.state === "ended") return;
    this.state = "ended";
    clearInterval(this.timer);
    clearTimeout(this.retry);
    this.microphone?.close();
    this.link?.close();
    this.transcript.finish();
    this.ended(error);
  }
}
