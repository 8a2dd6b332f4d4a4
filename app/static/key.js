// The key that a service may ask for. Kept for this tab alone.
const NAME = "hark-key";
let current = read();

function read() {
  try {
    return sessionStorage.getItem(NAME) ?? "";
  } catch { // storage can be forbidden, in a frame for instance
    return "";
  }
}

export function key() {
  return current;
}

export function keep(value) {
  current = value;
  try {
    sessionStorage.setItem(NAME, value);
  } catch { /* it then lasts until the page is left */ }
}

export function headers() {
  return current ? { Authorization: `Bearer ${current}` } : {};
}

// Below wherever the page lies. Browsers cannot set headers on a WebSocket, so there the key goes into the query.
export function address(path, parameters = {}) {
  const url = new URL(path, document.baseURI);
  for (const [name, value] of Object.entries(parameters)) url.searchParams.set(name, value);
  return url;
}

export function socketAddress(path, parameters) {
  const url = address(path, current ? { ...parameters, key: current } : parameters);
  url.protocol = url.protocol === "https:" ? "wss:" : "ws:";
  return url;
}
