// The microphone: PCM for whoever listens, and the browser's own track for WebRTC.

const PROBLEMS = {
  NotAllowedError: "The browser was not allowed to use the microphone. Allow it for this page and press Start again. Files can be transcribed without it.",
  NotFoundError: "No microphone was found. Plug one in and press Start again. Files can be transcribed without one.",
  NotReadableError: "The microphone is in use by another program.",
  OverconstrainedError: "The chosen microphone is not there any more. Choose another one.",
};

export class Microphone {
  // Asks for the microphone; throws an Error that says what to do. `heard({pcm, peak})` gets 16-bit PCM, 40 ms a time.
  static async open(deviceId, heard, gone) {
    const microphone = new Microphone(heard, gone);
    try {
      await microphone.#open(deviceId);
      return microphone;
    } catch (error) {
      microphone.close();
      throw error;
    }
  }

  constructor(heard, gone) {
    Object.assign(this, { heard, gone });
  }

  get sampleRate() {
    return this.context.sampleRate;
  }

  get track() {
    return this.stream.getAudioTracks()[0];
  }

  async #open(deviceId) {
    this.stream = await capture(deviceId);
    try {
      this.context = new AudioContext({ sampleRate: 16_000 });
      this.source = this.context.createMediaStreamSource(this.stream);
    } catch { // a browser that does not convert rates: the service does
      await this.context?.close();
      this.context = new AudioContext();
      this.source = this.context.createMediaStreamSource(this.stream);
    }
    await this.context.resume();
    await this.context.audioWorklet.addModule(new URL("recorder.js", import.meta.url));
    const options = { numberOfOutputs: 0, channelCount: 1, channelCountMode: "explicit" };
    this.node = new AudioWorkletNode(this.context, "recorder", options);
    this.node.port.onmessage = ({ data }) => (data.last ? this.flushed?.() : this.heard(data));
    this.source.connect(this.node);
    this.track.onended = () => this.gone();
  }

  // Hear another device from now on, in the same stream of PCM.
  async choose(deviceId) {
    const stream = await capture(deviceId), old = this.stream;
    this.source.disconnect();
    this.stream = stream;
    this.source = this.context.createMediaStreamSource(stream);
    this.source.connect(this.node);
    this.track.onended = () => this.gone();
    silence(old);
  }

  // The last samples have been handed over when this is done.
  async stop() {
    const flushed = new Promise((resolve) => { this.flushed = resolve; });
    this.node.port.postMessage("stop");
    await Promise.race([flushed, new Promise((resolve) => setTimeout(resolve, 500))]); // a context can be suspended
    this.close();
  }

  close() {
    if (this.stream) silence(this.stream);
    if (this.node) this.node.port.onmessage = null;
    if (this.context?.state !== "closed") this.context?.close();
  }
}

async function capture(deviceId) {
  if (!navigator.mediaDevices || !window.AudioWorkletNode) {
    throw new Error(window.isSecureContext ? "This browser cannot record sound. Files can be transcribed all the same." :
      "Browsers give the microphone only to pages opened over https or at localhost. Files can be transcribed here all the same.");
  }
  const audio = { channelCount: 1, echoCancellation: false, noiseSuppression: false, autoGainControl: true };
  if (deviceId) audio.deviceId = { exact: deviceId };
  return navigator.mediaDevices.getUserMedia({ audio }).catch((error) => {
    throw new Error(PROBLEMS[error.name] ?? `The microphone cannot be used: ${error.message}`);
  });
}

function silence(stream) {
  for (const track of stream.getTracks()) {
    track.onended = null;
    track.stop();
  }
}
