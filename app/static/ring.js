// The newest audio, bounded: what has not been answered yet can be sent again. Positions are samples since the start.
export class AudioRing {
  constructor(sampleRate, seconds) {
    this.sampleRate = sampleRate;
    this.capacity = sampleRate * seconds;
    this.pieces = []; // {at, samples}
    this.end = 0;
  }

  get start() {
    return this.pieces[0]?.at ?? this.end;
  }

  push(pcm) {
    const samples = new Int16Array(pcm);
    this.pieces.push({ at: this.end, samples });
    this.end += samples.length;
    while (this.end - this.start > this.capacity) this.pieces.shift();
  }

  // The audio from there on, in pieces.
  from(position) {
    const kept = this.pieces.filter(({ at, samples }) => at + samples.length > position);
    return kept.map(({ at, samples }) => (at < position ? samples.slice(position - at) : samples));
  }
}
