// Small helpers: elements, numbers, and the compressed blocks that the page carries.

const $ = (selector, root = document) => root.querySelector(selector);

const SVG = "http://www.w3.org/2000/svg";
const SVG_TAGS = new Set(["svg", "g", "path", "line", "circle", "rect", "text", "title"]);

// An element with attributes, listeners (functions) and children. Texts become text nodes, never markup.
function el(tag, attributes = {}, ...children) {
  const node = SVG_TAGS.has(tag) ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (typeof value === "function") node.addEventListener(name, value);
    else if (name.startsWith("--")) node.style.setProperty(name, value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

// What an environment or a model wrote, with control, zero-width and direction characters made visible.
function visible(text) {
  return String(text).replace(
    /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200b\u200e\u200f\u202a-\u202e\u2060-\u2069\ufeff]/g,
    (character) => {
      const code = character.charCodeAt(0);
      if (code < 0x20) return String.fromCharCode(0x2400 + code);
      return code === 0x7f ? "\u2421" : `⟨U+${code.toString(16).toUpperCase().padStart(4, "0")}⟩`;
    },
  );
}

const MINUS = "\u2212";

function short(value, digits = 3) {
  if (value === null || value === undefined) return "–";
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text =
    size >= 1e5 || size < 1e-3
      ? value.toExponential(Math.max(0, digits - 2)).replace("e+", "e").replace(/\.0+e/, "e")
      : String(Number(value.toPrecision(digits)));
  return text.replaceAll("-", MINUS);
}

function fixed(value, decimals) {
  return value === null || value === undefined ? "–" : value.toFixed(decimals).replace(/^-(0(?:\.0*)?)$/, "$1").replace("-", MINUS);
}

const signed = (value, decimals) => (value > 0 && fixed(value, decimals) !== fixed(0, decimals) ? "+" : "") + fixed(value, decimals);
const percent = (value) => (value === null || value === undefined ? "–" : `${fixed(100 * value, value === 0 ? 0 : Math.abs(value) < 0.01 ? 2 : 1)} %`);
const count = (number, noun) => `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : "s"}`;

// A probability: never shown as 0 or 1 when it is not.
function probability(value) {
  if (value === null || value === undefined) return "–";
  if (value > 0 && value < 0.0005) return short(value, 2);
  return value < 1 && value > 0.9995 ? "> 0.999" : fixed(value, 3);
}

function problem(message) {
  const box = $("#problem");
  box.textContent = message;
  box.hidden = false;
}

// JSON from the compressed block with this id; null where the page has no such block.
async function inflate(id) {
  const holder = document.getElementById(id);
  if (!holder) return null;
  const packed = atob(holder.textContent);
  const bytes = new Uint8Array(packed.length);
  for (let i = 0; i < packed.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

// The last few blocks stay inflated.
const kept = new Map();
function cached(id) {
  let block = kept.get(id);
  kept.delete(id);
  if (!block) block = inflate(id);
  kept.set(id, block);
  if (kept.size > 8) kept.delete(kept.keys().next().value);
  return block;
}

// Colour of a weight: above 1 and below 1 are two hues, the distance from 1 in bounds is the strength.
function tint(weight, bound) {
  if (weight === null || weight === undefined) return { class: "plain", "--strength": 0 };
  const t = Math.max(-1, Math.min(1, (weight - 1) / bound));
  return { class: Math.abs(t) < 0.02 ? "plain" : t > 0 ? "up" : "down", "--strength": Math.abs(t).toFixed(3) };
}

// About n round numbers from low to high, two at least.
function ticks(low, high, n = 3) {
  for (let most = n; most < n + 6; most++) {
    const found = roundNumbers(low, high, most);
    if (found.length > 1) return found;
  }
  return [low, high];
}

function roundNumbers(low, high, n) {
  const raw = (high - low) / n;
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw * 0.999);
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

const isTyping = (target) => target instanceof Element && target.closest("input:not([type=radio],[type=checkbox]), select, textarea");
