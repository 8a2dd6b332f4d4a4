// The two ways to speak /v1/stream's protocol, behind one face: SocketLink (PCM over a WebSocket) and RtcLink (WebRTC).
//
//   await link.open(config)   throws LinkError
//   link.sendAudio(samples)   an Int16Array, mono; WebRTC has the track instead
//   link.send(message)        a control message
//   link.close()
// and in between link.heard(event) for each event, and link.lost(error) if it ends by itself.
import { address, headers, key, socketAddress } from "./key.js";

const SOCKET_OPEN_MS = 8_000;
const GATHER_MS = 1_000;
const DISCONNECTED_MS = 2_000; // ICE says so after some lost checks, and often recovers
const WRONG_KEY = 401;

// `code` is one of docs/protocol.md part 4, or "unreachable", "refused" or "key".
export class LinkError extends Error {
  constructor(code, message = code) {
    super(message);
    this.code = code;
  }
}

class Link {
  constructor({ heard, lost }) {
    Object.assign(this, { heard, lost, isOpen: false, ended: false, fault: null });
  }

  async open(config) {
    await new Promise((resolve, reject) => {
      this.giveUp = reject;
      this.connect().then(resolve, (error) => this.end(error));
    });
    this.isOpen = true;
    this.send({ type: "config", ...config });
  }

  take(text) {
    const event = JSON.parse(text);
    if (event.type === "error" && event.fatal) {
      this.fault = event.code === "unauthorized" ? wrongKey() : new LinkError(event.code, event.message);
    }
    this.heard(event);
  }

  end(error) {
    if (this.ended) return;
    this.ended = true;
    this.release();
    if (this.isOpen) this.lost(this.fault ?? error);
    else this.giveUp(this.fault ?? error);
  }

  close() {
    if (this.ended) return;
    this.ended = true;
    this.release();
    this.giveUp(new LinkError("closed"));
  }
}

export class SocketLink extends Link {
  kind = "WebSocket";

  async connect() {
    const socket = this.socket = new WebSocket(socketAddress("v1/stream"));
    socket.onmessage = ({ data }) => this.take(data);
    const timer = setTimeout(() => this.end(new LinkError("unreachable")), SOCKET_OPEN_MS);
    const opened = await new Promise((resolve) => {
      socket.onopen = () => resolve(true);
      socket.onclose = () => resolve(false);
    });
    clearTimeout(timer);
    if (!opened) throw this.fault ?? await reasonOfRefusal();
    socket.onclose = () => this.end(new LinkError("unreachable"));
  }

  get unsentBytes() {
    return this.socket.bufferedAmount;
  }

  sendAudio(samples) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(samples);
  }

  send(message) {
    if (this.socket.readyState === WebSocket.OPEN) this.socket.send(JSON.stringify(message));
  }

  release() {
    this.socket?.close(1000);
  }
}

// A browser does not tell why a WebSocket was refused. An HTTP request beside it does.
async function reasonOfRefusal() {
  const answer = await fetch(address("v1/models"), { headers: headers(), cache: "no-store" }).catch(() => null);
  return answer?.status === WRONG_KEY ? wrongKey() : new LinkError("unreachable");
}

function wrongKey() {
  return new LinkError("key", key() ? "The service does not accept this key." : "This service asks for a key.");
}

export class RtcLink extends Link {
  kind = "WebRTC";
  unsentBytes = 0;

  constructor(track, handlers) {
    super(handlers);
    this.track = track;
  }

  // Done once the data channel is open, which it is after ICE and DTLS.
  async connect() {
    const { iceServers } = await request("v1/rtc-config");
    if (this.ended) return;
    const peer = this.peer = new RTCPeerConnection({ iceServers });
    const channel = this.channel = peer.createDataChannel("hark"); // before the offer, which must name it
    channel.onmessage = ({ data }) => this.take(data);
    channel.onclose = () => this.#broke();
    peer.onconnectionstatechange = () => this.#watch();
    const opened = new Promise((resolve) => { channel.onopen = resolve; });
    this.sender = peer.addTrack(this.track);
    await peer.setLocalDescription(await peer.createOffer());
    await gathered(peer);
    if (this.ended) return;
    const { sdp, type } = peer.localDescription;
    await peer.setRemoteDescription(await request("v1/rtc/offer", { sdp, type, webrtc_id: newId() }));
    await opened;
  }

  replaceTrack(track) {
    this.track = track;
    return this.sender?.replaceTrack(track);
  }

  sendAudio() {}

  send(message) {
    if (this.channel.readyState === "open") this.channel.send(JSON.stringify(message));
  }

  release() {
    clearTimeout(this.timer);
    this.channel?.close();
    this.peer?.close();
  }

  #watch() {
    clearTimeout(this.timer);
    const state = this.peer.connectionState;
    if (state === "failed" || state === "closed") this.#broke();
    if (state === "disconnected") this.timer = setTimeout(() => this.#broke(), DISCONNECTED_MS);
  }

  #broke() {
    this.end(new LinkError("unreachable", "the WebRTC connection broke"));
  }
}

// All candidates, or those found within a second: a server that cannot be reached must not hold the rest up.
function gathered(peer) {
  return new Promise((resolve) => {
    const look = () => peer.iceGatheringState === "complete" && resolve();
    peer.addEventListener("icegatheringstatechange", look);
    setTimeout(resolve, GATHER_MS);
    look();
  });
}

function newId() {
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}

// JSON from one of our endpoints. Throws LinkError.
async function request(path, body) {
  const sent = body && { method: "POST", body: JSON.stringify(body) };
  const type = body && { "Content-Type": "application/json" };
  const answer = await fetch(address(path), { ...sent, cache: "no-store", headers: { ...headers(), ...type } })
    .catch(() => { throw new LinkError("unreachable"); });
  if (answer.status === WRONG_KEY) throw wrongKey();
  const content = await answer.json().catch(() => ({}));
  if (answer.ok && content.status !== "failed") return content;
  const isFull = content.meta?.error === "concurrency_limit_reached"; // FastRTC's own words for it
  throw new LinkError(content.error?.code ?? (isFull ? "overloaded" : "refused"), content.error?.message);
}
