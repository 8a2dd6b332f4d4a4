// Runs on the audio thread: blocks of 128 float samples in, messages of 40 ms of 16-bit PCM with their peak level out.
class Recorder extends AudioWorkletProcessor {
  constructor() {
    super();
    this.chunk = new Int16Array(Math.round(sampleRate * 0.04));
    this.used = 0;
    this.peak = 0;
    this.stopped = false;
    this.port.onmessage = () => { this.flush(); this.stopped = true; this.port.postMessage({ last: true }); };
  }

  process([[samples]]) {
    if (this.stopped) return false; // a node with an input is called on all the same
    for (const sample of samples ?? []) {
      this.peak = Math.max(this.peak, Math.abs(sample));
      this.chunk[this.used++] = Math.max(-32768, Math.min(32767, Math.round(sample * 32768)));
      if (this.used === this.chunk.length) this.flush();
    }
    return true;
  }

  flush() {
    const pcm = this.chunk.slice(0, this.used).buffer;
    if (this.used) this.port.postMessage({ pcm, peak: this.peak }, [pcm]);
    this.used = this.peak = 0;
  }
}
registerProcessor("recorder", Recorder);
