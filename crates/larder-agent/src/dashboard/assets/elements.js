'use strict';
// Text of the daemon reaches the document only through `clean` and text nodes; attributes get it only as labels.

const SVG = 'http://www.w3.org/2000/svg';

// --- Text

/** Without characters that are invisible or change the order of others: controls, format characters, lone surrogates. */
const clean = (text) => String(text ?? '').replace(/[\p{Cc}\p{Cf}\p{Co}\p{Cs}\p{Zl}\p{Zp}]/gu, '\uFFFD');

function bytes(count) {
  if (count === null || count === undefined) return 'unknown';
  const units = ['B', 'kB', 'MB', 'GB', 'TB', 'PB'];
  let unit = 0;
  while (count >= 999.5 && unit < units.length - 1) {
    count /= 1000;
    unit += 1;
  }
  return `${unit === 0 || count >= 99.95 ? Math.round(count) : count.toPrecision(3)} ${units[unit]}`;
}

function duration(milliseconds) {
  const seconds = Math.round(milliseconds / 1000);
  const parts = [[86400, 'd'], [3600, 'h'], [60, 'm'], [1, 's']].map(([size, unit], at, all) => {
    const rest = at === 0 ? seconds : seconds % all[at - 1][0];
    return [Math.floor(rest / size), unit];
  });
  const first = Math.max(0, parts.findIndex(([count]) => count > 0));
  const shown = seconds === 0 ? [[0, 's']] : parts.slice(first, first + 2).filter(([count]) => count > 0);
  return shown.map(([count, unit]) => `${count}${unit}`).join(' ');
}

function localTime(value) {
  const date = new Date(value);
  if (Number.isNaN(date.getTime())) return 'unknown';
  const two = (number) => String(number).padStart(2, '0');
  const day = [date.getFullYear(), two(date.getMonth() + 1), two(date.getDate())].join('-');
  return `${day} ${[date.getHours(), date.getMinutes(), date.getSeconds()].map(two).join(':')}`;
}

const plural = (count, one, more) => `${count.toLocaleString('en')} ${count === 1 ? one : more}`;
const shortId = (id) => String(id ?? '').replace(/^sha256:/, '').slice(0, 12);
const nameOf = (names, id) => (names && names.length ? names[0] : shortId(id));

// --- Elements

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== undefined && value !== null) element.setAttribute(name, value);
  }
  for (const child of children.flat()) element.append(child instanceof Node ? child : clean(child));
  return element;
}
const make = (name, attributes = {}, ...children) => fill(document.createElement(name), attributes, children);
const draw = (name, attributes = {}, ...children) => fill(document.createElementNS(SVG, name), attributes, children);
const time = (value) => (value ? make('time', { datetime: clean(value) }, localTime(value)) : 'never');
const cell = (content, kind) => make('td', { class: kind }, content);
