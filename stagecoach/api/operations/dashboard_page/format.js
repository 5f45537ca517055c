"use strict";
// Numbers and times as people read them, and the few ways in which this page makes elements.

function count(number) {
  return Math.round(number).toLocaleString("en");
}

function rate(number) {
  return number >= 100 ? count(number) : number.toFixed(1);
}

function percent(part, whole) {
  if (!(whole > 0)) return "–";
  const share = 100 * part / whole;
  return `${share.toFixed(share >= 0.05 && share < 9.95 ? 1 : 0)} %`;
}

function duration(seconds) {
  if (seconds < 1) return `${(1000 * seconds).toFixed(seconds < 0.01 ? 2 : 1)} ms`;
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  if (seconds < 3600) return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
  return `${Math.floor(seconds / 3600)} h ${Math.floor(seconds % 3600 / 60)} min`;
}

function bytes(number) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (number >= 1024 && unit < units.length - 1) {
    number /= 1024;
    unit += 1;
  }
  return `${unit && number < 100 ? number.toFixed(1) : Math.round(number)} ${units[unit]}`;
}

function plural(number, noun) {
  return `${count(number)} ${noun}${number === 1 ? "" : "s"}`;
}

function byId(id) {
  return document.getElementById(id);
}

// Text only ever comes in as text.
function say(id, text) {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
}

function make(tag, className, ...children) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  element.append(...children);
  return element;
}

// As many children as items, made once and filled again, so that nothing flickers.
function fill(parent, items, create, update) {
  while (parent.childElementCount > items.length) parent.lastElementChild.remove();
  while (parent.childElementCount < items.length) parent.append(create());
  items.forEach((item, index) => update(parent.children[index], item, index));
}

function track(...classNames) {
  return make("div", "track", ...classNames.map((name) => make("i", name)));
}

// Widths of the parts of a track, as shares of `whole`.
function setTrack(element, whole, ...parts) {
  parts.forEach((part, index) => {
    element.children[index].style.width = `${whole > 0 ? 100 * part / whole : 0}%`;
  });
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// A canvas in pixels of the page, sharp on any screen.
function surface(canvas, height) {
  const width = canvas.clientWidth;
  const scale = window.devicePixelRatio || 1;
  const size = [Math.round(width * scale), Math.round(height * scale)];
  canvas.style.height = `${height}px`;
  if (canvas.width !== size[0] || canvas.height !== size[1]) [canvas.width, canvas.height] = size;
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}
