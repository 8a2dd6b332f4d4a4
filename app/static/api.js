// The tab "API": the examples with this page's own address in them, each with a button to copy it.
import { address, key, socketAddress } from "./key.js";
import { copy } from "./save.js";

const templates = new WeakMap(); // an example's text with its {places}

export function showApi(section) {
  const plain = (url) => url.href.split("?")[0].replace(/\/$/, "");
  const places = {
    "{http}": plain(address(".")), "{ws}": plain(socketAddress(".")), "{key}": key() ? "YOUR_KEY" : "none",
    "{curl-key}": key() ? ' -H "Authorization: Bearer YOUR_KEY"' : "", "{query-key}": key() ? "&key=YOUR_KEY" : "",
  };
  for (const block of section.querySelectorAll("pre")) {
    const code = block.querySelector("code"), title = block.previousElementSibling.textContent;
    if (!templates.has(code)) {
      templates.set(code, code.textContent);
      block.before(copyButton(code, title));
      block.tabIndex = 0; // a long line scrolls sideways
      block.role = "region";
      block.ariaLabel = title;
    }
    code.textContent = templates.get(code).replace(/\{[a-z-]+\}/g, (place) => places[place] ?? place);
  }
}

function copyButton(code, title) {
  const button = document.createElement("button");
  button.type = "button";
  button.className = "quiet copy-code";
  button.textContent = "Copy";
  button.ariaLabel = `Copy: ${title}`;
  button.onclick = async () => {
    button.textContent = (await copy(code.textContent)) ? "Copied" : "Not allowed";
    setTimeout(() => { button.textContent = "Copy"; }, 1_500);
  };
  return button;
}
