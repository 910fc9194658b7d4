
// The two pictures. Both have a table with the same content beside them.

function chart(samples, high, low, label) {
  const [width, height, left, bottom] = [1100, 220, 45, 25];
  // The names of the thresholds stand there, beside the curve.
  const right = high || low ? 165 : 5;
  const begin = Math.min(samples[0].at, samples.at(-1).at - 60);
  const span = samples.at(-1).at - begin;
  const x = (at) => left + ((at - begin) / span) * (width - left - right);
  const y = (percent) => 8 + (1 - percent / 100) * (height - bottom - 8);
  const share = (sample) => (sample.sizeBytes ? (100 * sample.usedBytes) / sample.sizeBytes : 0);
  const points = samples.map((sample) => `${x(sample.at).toFixed(1)},${y(share(sample)).toFixed(1)}`);
  const picture = draw('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': `Disk usage over time: ${clean(label)}` });
  for (const percent of [0, 25, 50, 75, 100]) {
    picture.append(draw('line', { class: 'axis', x1: left, x2: width - right, y1: y(percent), y2: y(percent) }));
    picture.append(draw('text', { x: left - 6, y: y(percent) + 4, 'text-anchor': 'end' }, `${percent}%`));
  }
  const end = x(samples.at(-1).at);
  picture.append(draw('polygon', { class: 'area', points: [`${x(samples[0].at)},${y(0)}`, ...points, `${end},${y(0)}`].join(' ') }));
  picture.append(draw('polyline', { class: 'curve', points: points.join(' ') }));
  for (const [kind, percent, words, above] of [['high', high, 'GC starts', 0], ['low', low, 'GC frees down to', 9]]) {
    if (!percent) continue;
    picture.append(draw('line', { class: kind, x1: left, x2: width - right, y1: y(percent), y2: y(percent) }));
    picture.append(draw('text', { x: width - right + 6, y: y(percent) + above }, `${words} ${percent}%`));
  }
  for (const [at, anchor] of [[begin, 'start'], [begin + span / 2, 'middle'], [begin + span, 'end']]) {
    picture.append(draw('text', { x: x(at), y: height - 6, 'text-anchor': anchor }, localTime(at * 1000).slice(11, span < 600 ? 19 : 16)));
  }
  return picture;
}

/** The start and the end of a name, in so many letters. */
function shorten(text, letters) {
  const cleaned = clean(text);
  if (cleaned.length <= letters) return cleaned;
  const tail = Math.ceil((letters - 1) * 0.6);
  return `${cleaned.slice(0, letters - 1 - tail)}\u2026${cleaned.slice(-tail)}`;
}

function treemap(tiles, words) {
  const [width, height] = [1100, 360];
  const hatch = draw('pattern', { id: 'hatch', width: 8, height: 8, patternUnits: 'userSpaceOnUse', patternTransform: 'rotate(45)' },
    draw('rect', { class: 'hatch-ground', width: 8, height: 8 }), draw('line', { class: 'hatch-line', x1: 0, x2: 0, y1: 0, y2: 8 }));
  const picture = draw('svg', { viewBox: `0 0 ${width} ${height}`, role: 'img', 'aria-label': `Treemap of layers by size: ${clean(words)}` }, draw('defs', {}, hatch));
  for (const { tile, x, y, w, h } of squarify(tiles, width, height)) {
    const title = draw('title', {}, `${tile.label}: ${bytes(tile.sizeBytes)}, ${tile.kind}`);
    picture.append(draw('rect', { class: tile.kind, x, y, width: w, height: h }, title));
    if (w > 90 && h > 34) {
      const letters = Math.floor((w - 12) / 7);
      picture.append(draw('text', { class: 'tile', x: x + 6, y: y + 15 }, shorten(tile.label, letters)));
      picture.append(draw('text', { class: 'tile', x: x + 6, y: y + 30 }, bytes(tile.sizeBytes).slice(0, letters)));
    }
  }
  return picture;
}

/** Rectangles for sorted tiles, as square as possible: rows along the shorter side of what is left. */
function squarify(tiles, width, height) {
  const placed = [];
  const total = tiles.reduce((sum, tile) => sum + tile.sizeBytes, 0);
  const scale = total ? (width * height) / total : 0;
  let [x, y, w, h] = [0, 0, width, height];
  const worst = (row, sum, side) => Math.max((side * side * row[0].sizeBytes * scale) / (sum * scale) ** 2, (sum * scale) ** 2 / (side * side * row.at(-1).sizeBytes * scale));
  for (let at = 0; at < tiles.length;) {
    const side = Math.min(w, h);
    const row = [tiles[at]];
    let sum = tiles[at].sizeBytes;
    for (let next = at + 1; next < tiles.length; next += 1) {
      if (worst([...row, tiles[next]], sum + tiles[next].sizeBytes, side) > worst(row, sum, side)) break;
      row.push(tiles[next]);
      sum += tiles[next].sizeBytes;
    }
    const depth = Math.max((sum * scale) / Math.max(side, 1e-9), 0);
    let along = 0;
    for (const tile of row) {
      const length = (side * tile.sizeBytes) / sum;
      placed.push(w >= h ? { tile, x, y: y + along, w: depth, h: length } : { tile, x: x + along, y, w: length, h: depth });
      along += length;
    }
    if (w >= h) [x, w] = [x + depth, Math.max(w - depth, 0)];
    else [y, h] = [y + depth, Math.max(h - depth, 0)];
    at += row.length;
  }
  return placed;
}

