// The page: a client of the public endpoints /v1/stream, /v1/audio/transcriptions and /readyz, which docs/protocol.md describes.
const LANGUAGES = ("af am ar as az ba be bg bn bo br bs ca cs cy da de el en es et eu fa fi fo fr gl gu ha haw he hi hr ht hu " +
  "hy id is it ja jw ka kk km kn ko la lb ln lo lt lv mg mi mk ml mn mr ms mt my ne nl nn no oc pa pl ps pt ro ru sa sd " +
  "si sk sl sn so sq sr su sv sw ta te tg th tk tl tr tt uk ur uz vi yi yo yue zh").split(" ");
const MAX_UNSENT_S = 10; // audio kept while the connection is being made or is slow; beyond that the stream is given up
const MIC_PROBLEMS = {
  NotAllowedError: "The browser was not allowed to use the microphone. Allow it for this page and press Start again.",
  NotFoundError: "No microphone was found. Plug one in and press Start again.",
  NotReadableError: "The microphone is in use by another program.",
};
const STREAM_PROBLEMS = {
  starting: "The service is still starting. Try again in a few seconds.",
  overloaded: "All streams of this service are in use. Try again later.",
  shutting_down: "The service is going down. What was said so far is above.",
};

const $ = (id) => document.getElementById(id);
const lines = []; // the text for copy and download
const unsettled = new Map(); // utterance → its element, until its final
let recording = null; // the running Recording
let offsetMs = 0; // audio of the recordings before this one
let watching = 0; // the timer of the next look at /readyz

// What is shown ---------------------------------------------------------------------------------------------------------

function show(text) {
  if ($("state").textContent !== text) $("state").textContent = text; // else it would be read out again
}

function complain(text) {
  $("problem").textContent = text;
  $("problem").hidden = !text;
}

function clock(ms) {
  const s = Math.floor(ms / 1000), two = (n) => String(n).padStart(2, "0");
  return (s >= 3600 ? `${Math.floor(s / 3600)}:` : "") + `${two(Math.floor(s / 60) % 60)}:${two(s % 60)}`;
}

function row(parent, ms, ...content) {
  const p = document.createElement("p"), time = document.createElement("time"), text = document.createElement("span");
  p.dataset.ms = ms;
  time.textContent = clock(ms);
  text.dir = "auto";
  text.append(...content);
  p.append(time, text);
  parent.append(p);
  return p;
}

function span(text, className) {
  const element = document.createElement("span");
  element.className = className;
  element.textContent = text;
  return element;
}

function keep(ms, text) {
  if (!text) return;
  row($("finals"), ms, text);
  lines.push(`[${clock(ms)}] ${text}`);
  refresh();
}

function heading(text) {
  const element = document.createElement("h2");
  element.textContent = text;
  $("finals").append(element);
  lines.push(`# ${text}`);
  refresh();
}

function refresh() {
  $("hint").hidden = lines.length > 0 || unsettled.size > 0;
  for (const id of ["copy", "download", "clear"]) $(id).disabled = !lines.length;
  const atEnd = window.innerHeight + window.scrollY > document.body.scrollHeight - 120;
  if (atEnd && recording) $("open").scrollIntoView({ block: "nearest" });
}

// Live ------------------------------------------------------------------------------------------------------------------

async function openMicrophone() {
  if (!navigator.mediaDevices || !window.AudioWorkletNode) {
    throw new Error(window.isSecureContext ? "This browser cannot record sound." :
      "Browsers give the microphone only to pages opened over https or at localhost. Files can be opened here all the same.");
  }
  const wanted = { channelCount: 1, echoCancellation: false, autoGainControl: true, noiseSuppression: false };
  const stream = await navigator.mediaDevices.getUserMedia({ audio: wanted }).catch((error) => {
    throw new Error(MIC_PROBLEMS[error.name] ?? `The microphone cannot be used: ${error.message}`);
  });
  try {
    return { stream, ...(await listen(stream)) };
  } catch (error) {
    stream.getTracks().forEach((track) => track.stop());
    throw error;
  }
}

async function listen(stream) {
  let context = new AudioContext({ sampleRate: 16000 }), source;
  try {
    source = context.createMediaStreamSource(stream);
  } catch { // a browser that does not convert rates: the service does
    await context.close();
    context = new AudioContext();
    source = context.createMediaStreamSource(stream);
  }
  context.resume();
  await context.audioWorklet.addModule("static/recorder.js");
  const node = new AudioWorkletNode(context, "recorder", { numberOfOutputs: 0, channelCount: 1, channelCountMode: "explicit" });
  source.connect(node);
  return { context, node };
}

class Recording {
  constructor(microphone) {
    this.microphone = microphone;
    this.unsent = [];
    this.maxUnsentBytes = microphone.context.sampleRate * 2 * MAX_UNSENT_S;
    this.ended = false; // by us, by the service or by the network
    this.audioMs = 0;
    const url = new URL("v1/stream", location.href);
    url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
    url.search = new URLSearchParams({ sample_rate: microphone.context.sampleRate, language: $("language").value, words: false });
    this.socket = new WebSocket(url);
    this.socket.onopen = () => this.unsent.splice(0).forEach((message) => this.socket.send(message));
    this.socket.onmessage = ({ data }) => this.receive(JSON.parse(data));
    this.socket.onclose = () => this.end("The connection to the service was lost. Press Start to go on.");
    microphone.node.port.onmessage = ({ data }) => (data.last ? this.send('{"type":"eof"}') : this.hear(data));
    microphone.stream.getAudioTracks()[0].onended = () => { complain("The microphone was unplugged or taken away."); this.stop(); };
  }

  hear({ pcm, peak }) {
    $("level").value = Math.sqrt(peak);
    this.audioMs += pcm.byteLength / 2 / this.microphone.context.sampleRate * 1000;
    this.send(pcm);
    const waiting = this.socket.bufferedAmount + this.unsent.reduce((sum, message) => sum + (message.byteLength ?? 0), 0);
    if (waiting > this.maxUnsentBytes) this.end("The service or the network does not keep up with the microphone.");
  }

  send(message) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(message);
    else if (this.socket.readyState === WebSocket.CONNECTING) this.unsent.push(message);
  }

  receive(message) {
    switch (message.type) {
      case "ready": return show(`Listening (${message.model})`);
      case "lag": return this.stopping || show(message.lag_ms > 3000 ? `Listening, ${Math.round(message.lag_ms / 1000)} s behind` : "Listening");
      case "speech_started":
        unsettled.set(message.utterance, row($("open"), offsetMs + message.at_ms, span("…", "tentative")));
        return refresh();
      case "partial":
        unsettled.get(message.utterance)?.lastChild.replaceChildren(message.committed, span(message.tentative, "tentative"));
        return refresh();
      case "final": return this.settle(message, () => keep(offsetMs + message.start_ms, message.text));
      case "failed": return this.settle(message, () =>
        row($("finals"), offsetMs + message.start_ms, span(`not transcribed: ${message.message}`, "missing")));
      case "error": return message.fatal ? this.end(STREAM_PROBLEMS[message.code] ?? message.message) : complain(message.message);
      case "done": return this.end("");
    }
  }

  settle(message, render) {
    unsettled.get(message.utterance)?.remove();
    unsettled.delete(message.utterance);
    render();
    refresh();
  }

  stop() {
    this.stopping = true;
    show("Finishing …");
    $("toggle").disabled = true;
    this.silence();
    this.microphone.node.port.postMessage("stop"); // answered with the last samples, then eof goes out
  }

  silence() {
    this.microphone.stream.getTracks().forEach((track) => { track.onended = null; track.stop(); });
    $("level").value = 0;
  }

  end(problem) {
    if (this.ended) return;
    this.ended = true;
    this.silence();
    this.microphone.node.port.onmessage = null;
    this.microphone.context.close();
    this.socket.close();
    for (const element of unsettled.values()) { // what was shown when the connection broke is not thrown away
      const text = element.lastChild.textContent.trim();
      element.remove();
      if (text !== "…") keep(Number(element.dataset.ms), `${text} …`);
    }
    unsettled.clear();
    offsetMs += this.audioMs;
    recording = null;
    $("toggle").textContent = "Start";
    if (problem) complain(problem);
    refresh();
    watch();
  }
}

async function toggle() {
  if (recording) return recording.stop();
  complain("");
  $("toggle").disabled = true;
  show("Waiting for the microphone …");
  try {
    const microphone = await openMicrophone();
    show("Connecting …");
    recording = new Recording(microphone);
    $("toggle").textContent = "Stop";
    $("toggle").disabled = false;
  } catch (error) {
    complain(error.message);
    watch();
  }
}

// Until the service is ready, ask again; while it is, there is nothing to ask.
async function watch() {
  clearTimeout(watching);
  let status = "";
  try {
    const answer = await fetch("readyz", { cache: "no-store" });
    const body = await answer.json(), model = body.model;
    if (recording) return;
    status = body.status;
    show({ ready: `Ready (${model})`, starting: "The service is starting …", draining: "The service is going down" }[status]);
  } catch {
    show("The service cannot be reached");
  }
  $("toggle").disabled = status !== "ready";
  if (status !== "ready") watching = setTimeout(watch, 2000);
}

// Files -----------------------------------------------------------------------------------------------------------------

async function transcribe(file) {
  if (!file) return;
  complain("");
  show(`Transcribing ${file.name} …`);
  const form = new FormData();
  form.append("file", file);
  form.append("response_format", "verbose_json");
  form.append("language", $("language").value);
  try {
    const answer = await fetch("v1/audio/transcriptions", { method: "POST", body: form });
    const body = await answer.json();
    if (!answer.ok) throw new Error(body.error.message);
    heading(file.name);
    for (const segment of body.segments) keep(segment.start * 1000, segment.text);
    complain([...(body.segments.length ? [] : ["No speech was found in the file."]), ...(body.warnings ?? [])].join("; "));
  } catch (error) {
    complain(`${file.name}: ${error instanceof TypeError ? "the service cannot be reached" : error.message}`);
  }
  if (!recording) watch();
}

// The transcript --------------------------------------------------------------------------------------------------------

async function copy() {
  const text = lines.join("\n");
  if (navigator.clipboard) await navigator.clipboard.writeText(text);
  else { // not a secure page
    const area = document.body.appendChild(Object.assign(document.createElement("textarea"), { value: text }));
    area.select();
    document.execCommand("copy");
    area.remove();
  }
  $("copy").textContent = "Copied";
  setTimeout(() => { $("copy").textContent = "Copy"; }, 1500);
}

function download() {
  const url = URL.createObjectURL(new Blob([lines.join("\n") + "\n"], { type: "text/plain" }));
  Object.assign(document.createElement("a"), { href: url, download: "transcript.txt" }).click();
  setTimeout(() => URL.revokeObjectURL(url), 10000);
}

function clear() {
  lines.length = 0;
  $("finals").replaceChildren();
  refresh();
}

const names = new Intl.DisplayNames(undefined, { type: "language" });
for (const [name, code] of LANGUAGES.map((code) => [names.of(code), code]).sort(([a], [b]) => a.localeCompare(b))) {
  $("language").append(new Option(name, code));
}
$("controls").onsubmit = (event) => event.preventDefault();
$("toggle").onclick = toggle;
$("file").onchange = ({ target }) => { transcribe(target.files[0]); target.value = ""; };
$("copy").onclick = copy;
$("download").onclick = download;
$("clear").onclick = clear;
document.body.ondragover = (event) => { event.preventDefault(); document.body.classList.add("dropping"); };
document.body.ondragleave = () => document.body.classList.remove("dropping");
document.body.ondrop = (event) => {
  event.preventDefault();
  document.body.classList.remove("dropping");
  transcribe(event.dataTransfer.files[0]);
};
watch();
