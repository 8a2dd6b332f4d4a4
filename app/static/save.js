// Copying a transcript and saving it as a file. Both are made here in the page, from its own data.
import { FORMATS, toText } from "./formats.js";

export function copyOnClick(button, utterances) {
  const name = button.textContent;
  button.onclick = async () => {
    button.textContent = (await copy(toText(utterances()))) ? "Copied" : "Not allowed";
    setTimeout(() => { button.textContent = name; }, 1_500);
  };
}

// Each button with data-format saves in that format.
export function downloadOnClick(toolbar, utterances, fileName) {
  for (const button of toolbar.querySelectorAll("[data-format]")) {
    button.onclick = () => {
      const { type, write } = FORMATS[button.dataset.format];
      const url = URL.createObjectURL(new Blob([write(utterances())], { type: `${type};charset=utf-8` }));
      Object.assign(document.createElement("a"), { href: url, download: `${fileName()}.${button.dataset.format}` }).click();
      setTimeout(() => URL.revokeObjectURL(url), 10_000);
    };
  }
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch { // not a secure page, or a frame that may not
    const area = Object.assign(document.createElement("textarea"), { value: text });
    document.body.append(area);
    area.select();
    const done = document.execCommand("copy");
    area.remove();
    return done;
  }
}
