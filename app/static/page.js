// Puts the page together once Gradio has drawn it. Each tab is a file of its own; this one knows what they share.
import { showApi } from "./api.js";
import { Files } from "./files.js";
import { address, headers, keep } from "./key.js";
import { Live } from "./live.js";

const ASK_AGAIN_MS = 2_000;
const WRONG_KEY = 401;

// The elements with an id, by that id: $("toggle").
const $ = (id) => document.getElementById(id);

function drawn() {
  return new Promise((resolve) => {
    const look = () => ["toggle", "file", "key-form"].every($) && document.querySelector(".api") && resolve();
    const observer = new MutationObserver(() => look());
    observer.observe(document.body, { childList: true, subtree: true });
    look();
  }).then(() => undefined);
}

class Page {
  constructor() {
    this.live = new Live($, { needKey: () => this.askForKey(), watch: () => this.watch() });
    this.files = new Files($, { needKey: () => this.askForKey() });
    showApi(document.querySelector(".api"));
    $("key-form").onsubmit = (event) => this.takeKey(event);
    this.#takeDrops();
    window.addEventListener("pagehide", () => { this.live.abandon(); this.files.cancel(); });
    window.addEventListener("online", () => this.live.retryNow());
    this.watch();
  }

  // Until the service is ready, ask again; while it is, there is nothing to ask.
  async watch() {
    clearTimeout(this.watching);
    const { status, model } = await this.#readiness();
    const said = {
      ready: `Ready · ${model}`, starting: "The service is starting …", draining: "The service is going down",
      key: "Locked", gone: "The service cannot be reached",
    };
    $("service").dataset.status = status;
    if ($("service-text").textContent !== said[status]) $("service-text").textContent = said[status];
    if (status === "key") this.askForKey();
    this.live.offer(status);
    if (status !== "ready") this.watching = setTimeout(() => this.watch(), ASK_AGAIN_MS);
  }

  async #readiness() {
    try {
      const answer = await fetch(address("readyz"), { cache: "no-store", headers: headers() });
      if (answer.status === WRONG_KEY) return { status: "key" };
      return await answer.json();
    } catch {
      return { status: "gone" };
    }
  }

  askForKey() {
    if (!$("key-form").hidden) return;
    $("key-form").hidden = false;
    $("key").focus();
  }

  takeKey(event) {
    event.preventDefault();
    keep($("key").value.trim());
    $("key").value = "";
    $("key-form").hidden = true;
    showApi(document.querySelector(".api"));
    this.watch();
  }

  // A file can be dropped anywhere.
  #takeDrops() {
    const over = (is) => document.body.classList.toggle("dropping", is);
    document.addEventListener("dragover", (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      over(true);
    });
    document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) over(false); });
    document.addEventListener("drop", (event) => {
      if (!event.dataTransfer?.files.length) return;
      event.preventDefault();
      over(false);
      $("hark-files-button")?.click();
      this.files.transcribe(event.dataTransfer.files[0]);
    });
  }
}

await drawn();
new Page();
