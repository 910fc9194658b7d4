// What the page shows, section by section, and when it is loaded.

const $ = (id) => document.getElementById(id);
const PAGE_ROWS = 50;
/** How many points of the disk this page itself remembers, one a second. */
const LIVE_POINTS = 900;
const state = {
  status: null, samples: [], live: [], sort: 'size', ascending: false, offset: 0, removalsOffset: 0,
  pulls: null, changes: '', reclaimable: null,
};

/** Sets a text only if it changed, so that a live region is read out once. */
function announce(element, text) {
  const cleaned = clean(text);
  if (element.textContent !== cleaned) element.textContent = cleaned;
}

/** Shows items as children with a key each. Unchanged ones are kept as they are; the focus stays on the same key. */
function show(parent, items, keyOf, build) {
  const before = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  const focused = document.activeElement?.closest('[data-key]')?.dataset.key;
  const hadFocus = parent.contains(document.activeElement);
  const now = items.map((item, at) => {
    const key = String(keyOf(item, at));
    const content = JSON.stringify(item);
    const old = before.get(key);
    if (old && old.content === content) return old;
    const made = build(item);
    made.dataset.key = key;
    made.content = content;
    return made;
  });
  if (now.length !== parent.children.length || now.some((child, at) => child !== parent.children[at])) {
    parent.replaceChildren(...now);
  }
  if (hadFocus && !parent.contains(document.activeElement)) {
    now.find((child) => child.dataset.key === focused)?.querySelector('button')?.focus();
  }
}

const tableBody = (id) => $(id).querySelector('tbody');

/** Shows that there is nothing, in place of what is loading; or hides it. */
function showNone(none, count) {
  announce($(none), $(none).dataset.none);
  $(none).hidden = count > 0;
}

function showTable(id, none, rows, keyOf, build) {
  showNone(none, rows.length);
  $(id).parentElement.hidden = rows.length === 0;
  show(tableBody(id), rows, keyOf, build);
}

// --- Data

async function load(path, parameters = {}) {
  const response = await fetch(`api/${path}?${new URLSearchParams(parameters)}`, { cache: 'no-store' });
  const text = await response.text();
  if (response.ok) return JSON.parse(text);
  let message = text;
  try {
    message = JSON.parse(text).error;
  } catch { /* plain text */ }
  throw new Error(message || `the daemon answered ${response.status}`);
}

/** Calls `work` at most once per `pause`; the last call counts. */
function paced(work, pause) {
  let waiting = false;
  let again = false;
  const run = async () => {
    if (waiting) {
      again = true;
      return;
    }
    waiting = true;
    again = false;
    await work();
    setTimeout(() => {
      waiting = false;
      if (again) run();
    }, pause);
  };
  return run;
}

/**
 * Loads with `request` and passes the result to `display`, unless a later call has begun. Reports in `place` why it failed, and tries
 * again; the text that `place` had at first returns with the next success.
 */
function loading(place, request, display) {
  const initial = $(place).dataset.none ?? $(place).textContent;
  let [retry, calls, failure] = [0, 0, ''];
  const run = async () => {
    calls += 1;
    const call = calls;
    clearTimeout(retry);
    try {
      const loaded = await request();
      if (call !== calls) return;
      if (failure) announce($(place), initial);
      failure = '';
      display(loaded);
    } catch (error) {
      if (call !== calls) return;
      failure = `Cannot load: ${error.message}`;
      announce($(place), failure);
      $(place).hidden = false;
      retry = setTimeout(run, 5000);
    }
  };
  return run;
}

// --- Disk

function showDisk() {
  if (!state.status) return;
  const { disk } = state.status;
  if (!disk) {
    announce($('disk-now'), 'Not measured yet');
    return;
  }
  const used = disk.sizeBytes - disk.availableBytes;
  const { gcStartsAtPercent: high, gcFreesToPercent: low } = disk;
  const rule = high ? `GC starts at ${high}%${low ? ` and frees down to ${low}%` : ''}` : 'GC never starts by bytes';
  const free = state.reclaimable === null ? '' : `, ${bytes(state.reclaimable)} reclaimable`;
  const now = `${disk.usedPercent}% used (${bytes(used)} of ${bytes(disk.sizeBytes)})${free}, ${rule}`;
  announce($('disk-now'), now);
  // The time of the daemon, as in its samples: the clock of this machine may differ.
  const { at } = state.status;
  if (state.live.at(-1)?.at !== at) state.live = [...state.live, { at, usedBytes: used, sizeBytes: disk.sizeBytes }].slice(-LIVE_POINTS);
  const samples = [...state.samples, ...state.live].sort((a, b) => a.at - b.at);
  $('disk-chart').replaceChildren(chart(samples, high, low, now));
  showDiskTable(samples);
}

function showDiskTable(samples) {
  const run = Math.ceil(samples.length / 12);
  const peaks = [];
  for (let at = 0; at < samples.length; at += run) {
    peaks.push(samples.slice(at, at + run).reduce((most, sample) => (sample.usedBytes > most.usedBytes ? sample : most)));
  }
  show(tableBody('disk-table'), peaks.reverse(), (_, at) => at, (sample) => make('tr', {},
    cell(time(new Date(sample.at * 1000).toISOString())), cell(bytes(sample.usedBytes), 'number'),
    cell(`${Math.ceil((100 * sample.usedBytes) / sample.sizeBytes)}%`, 'number')));
}

// --- Pulls

/** A key for each pull: its image, with a number where pulls with different credentials have the same one. */
function pullKeys(pulls) {
  const counts = new Map();
  return pulls.map(({ image }) => {
    const count = (counts.get(image) ?? 0) + 1;
    counts.set(image, count);
    return count === 1 ? image : `${image} (${count})`;
  });
}

function showPulls() {
  const { pulls, morePulls } = state.status;
  showNone('pulls-none', pulls.length);
  announce($('pulls-more'), morePulls ? `and ${plural(morePulls, 'more pull', 'more pulls')}` : '');
  const keys = pullKeys(pulls);
  show($('pulls-list'), pulls, (_, at) => keys[at], pullItem);
  const now = new Set(keys);
  if (state.pulls) {
    const began = [...now].filter((image) => !state.pulls.has(image)).map((image) => `pull of ${image} started`);
    const ended = [...state.pulls].filter((image) => !now.has(image)).map((image) => `pull of ${image} ended`);
    const news = [...began, ...ended];
    if (news.length) announce($('pulls-news'), news.length > 3 ? `${news.length} pulls started or ended` : news.join(', '));
  }
  state.pulls = now;
}

/** What a pull or a layer does, in words. */
function progressText(part, phase) {
  const words = [phase];
  if (part.doneBytes !== null && part.doneBytes !== undefined) {
    words.push(part.totalBytes ? `${bytes(part.doneBytes)} of ${bytes(part.totalBytes)}` : bytes(part.doneBytes));
  }
  if (part.bytesPerSecond) words.push(`${bytes(part.bytesPerSecond)}/s`);
  if (part.waiting) {
    const left = part.waitingMilliseconds ? ` (${duration(part.waitingMilliseconds)} left)` : '';
    words.push(`waiting: ${part.waiting}${left}`);
  }
  return words.filter(Boolean).join(', ');
}

function progressBar(part, label) {
  const known = part.totalBytes > 0;
  return make('progress', { 'aria-label': clean(label), max: known ? part.totalBytes : undefined, value: known ? part.doneBytes ?? 0 : undefined });
}

function pullItem(pull) {
  const layers = pull.layers.map((layer) => make('li', { class: 'layer' },
    make('code', {}, shortId(layer.digest)), progressBar(layer, `layer ${shortId(layer.digest)}`),
    make('span', {}, progressText(layer, layer.phase))));
  const phase = pull.phase === 'pulling' && pull.step ? pull.step : pull.phase;
  return make('li', { class: 'pull' },
    make('h3', { class: 'name' }, pull.image), progressBar(pull, `pull of ${pull.image}`),
    make('p', {}, `${progressText(pull, phase)}, ${duration(pull.milliseconds)}`),
    make('ul', { class: 'plain', 'aria-label': clean(`layers of ${pull.image}`) }, layers));
}

// --- Registries

function showRegistries() {
  const registries = state.status.registries ?? [];
  showTable('registries-table', 'registries-none', registries, (registry) => registry.host, (registry) => {
    const wait = registry.retryAfterMilliseconds;
    const left = registry.quotaRemaining ?? null;
    const of = registry.quotaLimit ? ` of ${registry.quotaLimit}` : '';
    const quota = left === null ? 'no limit reported' : `${left}${of} requests left`;
    return make('tr', {},
      make('th', { scope: 'row', class: 'name' }, registry.host),
      cell(`${registry.connections} of ${registry.connectionLimit}`, 'number'), cell(String(registry.waitingRequests), 'number'),
      cell(String(registry.requests), 'number'), cell(bytes(registry.receivedBytes), 'number'), cell(String(registry.throttled), 'number'),
      cell(wait ? `${quota}; must wait ${duration(wait)}` : quota));
  });
}

// --- Images

const loadImages = loading('images-count', () => load('images', {
  filter: $('filter').value, sort: state.sort, ascending: state.ascending, offset: state.offset, limit: PAGE_ROWS,
}), (page) => {
  state.offset = page.offset;
  const matching = page.matching === page.total ? '' : `, ${page.matching.toLocaleString('en')} match`;
  const warnings = page.warnings.map((warning) => `; ${warning}`).join('');
  announce($('images-count'), `${plural(page.total, 'image', 'images')}${matching}${warnings}`);
  show(tableBody('images-table'), page.rows, (row) => row.id, imageRow);
  pager('images', page.offset, page.rows.length, page.matching);
  for (const header of $('images-table').querySelectorAll('th[data-sort]')) {
    if (header.dataset.sort === state.sort) header.setAttribute('aria-sort', state.ascending ? 'ascending' : 'descending');
    else header.removeAttribute('aria-sort');
  }
});

function imageRow(row) {
  const button = make('button', { type: 'button', 'aria-haspopup': 'dialog' }, row.name || shortId(row.id));
  button.addEventListener('click', () => explain(row));
  const more = row.moreNames ? make('span', { class: 'dim' }, ` and ${plural(row.moreNames, 'more name', 'more names')}`) : '';
  const type = row.type === 'image' ? '' : make('span', { class: 'dim' }, ` ${row.type}`);
  return make('tr', {}, cell([button, more, type], 'long'), cell(bytes(row.sizeBytes), 'number'),
    cell(bytes(row.uniqueBytes), 'number'), cell(time(row.lastUsed)),
    cell(row.percentHere === null ? row.state : `${row.state}, ${row.percentHere}% here`));
}

function pager(prefix, offset, count, total) {
  announce($(`${prefix}-range`), total ? `${(offset + 1).toLocaleString('en')} to ${(offset + count).toLocaleString('en')} of ${total.toLocaleString('en')}` : '');
  $(`${prefix}-previous`).parentElement.hidden = offset === 0 && count >= total;
  $(`${prefix}-previous`).disabled = offset === 0;
  $(`${prefix}-next`).disabled = offset + count >= total;
}

// --- Why an image is present

async function explain(row) {
  const [dialog, body] = [$('explain'), $('explain-body')];
  const wait = make('p', {}, 'Loading');
  body.replaceChildren(make('p', { class: 'name' }, row.name || row.id), wait);
  dialog.showModal();
  $('explain-title').focus();
  try {
    const facts = explanation(await load('explain', { image: row.id }), row.type);
    if (!wait.isConnected) return; // another image was selected
    body.replaceChildren(make('dl', {}, facts.map(([term, value]) => [make('dt', {}, term), make('dd', {}, value)]).flat()));
  } catch (error) {
    if (!wait.isConnected) return;
    body.replaceChildren(make('p', { role: 'alert' }, `Cannot explain: ${error.message}`));
  }
}

function explanation(explained, type) {
  const decision = explained.decision ?? {};
  const used = explained.millisecondsSinceLastUsed;
  return [
    ['Names', (decision.names ?? []).join(', ') || 'none'],
    ['ID', decision.id],
    ['Type', type],
    ['Now', `${decision.remove ? 'would be removed' : 'retained'}: ${decision.why}`],
    ['Under pressure', explained.underPressure],
    ['If all unused images are removed', explained.removable ? 'removed' : 'retained'],
    ['Used by', (decision.usedBy ?? []).join(', ') || 'nothing'],
    ['Size', bytes(decision.sizeBytes)],
    ['Here', explained.incomplete ?? ''],
    ['Freed by its removal', bytes(decision.uniqueBytes)],
    ['Shared with other images', bytes(explained.sharedBytes)],
    ['First seen', `${duration(explained.millisecondsSinceFirstSeen)} ago`],
    ['Last used', used === null || used === undefined ? 'never' : `${duration(used)} ago`],
  ].filter(([, value]) => value !== '' && value !== undefined);
}

// --- Layers

const loadLayers = loading('layers-sum', () => load('layers'), ({ shared, unique }) => {
  const words = `${plural(shared.count, 'layer', 'layers')} shared by several images (${bytes(shared.sizeBytes)}), `
    + `${plural(unique.count, 'layer', 'layers')} unique to one image (${bytes(unique.sizeBytes)})`;
  announce($('layers-sum'), words);
  const tiles = [['shared', shared], ['unique', unique]].flatMap(([kind, group]) => {
    const rest = group.restCount
      ? [{ kind, sizeBytes: group.restBytes, label: `${plural(group.restCount, 'smaller layer', 'smaller layers')}`, images: '' }] : [];
    const label = ({ images, image }) => (images > 1 ? `${plural(images, 'image', 'images')}: ${image}` : image || 'no image');
    return [...group.layers.map((layer) => ({ ...layer, kind, label: label(layer) })), ...rest];
  });
  tiles.sort((a, b) => b.sizeBytes - a.sizeBytes);
  $('layers-map').replaceChildren(treemap(tiles.filter((tile) => tile.sizeBytes > 0), words));
  show(tableBody('layers-table'), tiles, (tile, at) => tile.id ?? `rest ${at}`, (tile) => make('tr', {},
    cell(tile.id ? make('code', {}, shortId(tile.id)) : tile.label), cell(tile.kind), cell(bytes(tile.sizeBytes), 'number'),
    cell(String(tile.images), 'number'), cell(tile.id ? tile.label : '', 'long')));
});

// --- Garbage collection

function showGc() {
  const { gc } = state.status;
  if (!gc) {
    announce($('gc-now'), 'No garbage collection');
    return;
  }
  const failed = gc.failures ? `; ${plural(gc.failures, 'round', 'rounds')} in a row failed` : '';
  const last = gc.ended ? `Last round ${localTime(gc.ended)}: ${gc.result ?? ''}${failed}` : 'No round yet';
  announce($('gc-now'), gc.running || gc.round ? 'A round is running' : `${last}; ${plural(gc.rounds, 'round', 'rounds')} since the start`);
  const round = gc.round;
  if (!round) {
    $('gc-round').replaceChildren();
    return;
  }
  const removing = round.removing ? `, removing ${nameOf(round.removing.names, round.removing.id)}: ${round.removing.why ?? ''}` : '';
  const of = round.neededBytes || round.promisedBytes;
  $('gc-round').replaceChildren(
    make('progress', { 'aria-label': 'freed by this round', max: of || undefined, value: of ? round.freedBytes : undefined }),
    make('p', { class: 'name' }, `${round.phase}: freed ${bytes(round.freedBytes)} of ${bytes(of)}, ${round.removedImages} of ${plural(round.plannedImages, 'image', 'images')}${removing}`));
}

const loadRemovals = loading('gc-none', () => load('history', { offset: state.removalsOffset }), ({ total, entries }) => {
  showTable('gc-table', 'gc-none', entries, (entry, at) => `${entry.time} ${entry.id} ${at}`, (entry) => make('tr', {},
    cell(time(entry.time)), make('th', { scope: 'row', class: 'name long' }, nameOf(entry.names, entry.id)), cell(entry.trigger),
    cell(entry.why, 'long'), cell(`${entry.estimated ? 'about ' : ''}${bytes(entry.freedBytes ?? entry.promisedBytes)}`, 'number')));
  pager('gc', state.removalsOffset, entries.length, total);
});

// --- Events

const loadEvents = loading('events-none', () => load('events'), ({ events }) => {
  showTable('events-table', 'events-none', events.reverse(), (event) => event.number, (event) => make('tr', {},
    cell(time(event.time)), cell(event.type), cell(event.reason),
    cell(event.object, 'long'), cell(event.message, 'long')));
});

// --- The daemon's state

const refreshEvents = paced(async () => { await Promise.all([loadEvents(), loadRemovals()]); }, 2000);
const refreshImages = paced(async () => { await Promise.all([loadImages(), loadLayers()]); }, 5000);
const loadDisk = loading('disk-now', () => load('disk'), ({ samples, reclaimableBytes }) => {
  state.samples = samples;
  state.reclaimable = reclaimableBytes;
  showDisk();
});

const refreshDisk = paced(loadDisk, 5000);

function take(status) {
  if (state.status && status.uptimeSeconds < state.status.uptimeSeconds) {
    // Another process, maybe with another store: nothing of the last one continues.
    Object.assign(state, { samples: [], live: [], pulls: null, changes: '', reclaimable: null, offset: 0, removalsOffset: 0 });
    loadDisk();
  }
  state.status = status;
  const health = status.backendAvailable ? '' : ` (unavailable: ${status.backendMessage})`;
  announce($('node'), `${status.version}, ${status.backend}${health}`);
  show($('warnings'), status.warnings, (warning) => warning, (warning) => make('p', {}, `Warning: ${warning}`));
  showDisk();
  showPulls();
  showRegistries();
  showGc();
  const changes = [status.nextEvent, status.removals, status.gc?.rounds].join();
  if (changes !== state.changes) {
    state.changes = changes;
    refreshEvents();
    refreshImages();
    refreshDisk();
  }
}

let stream;
let retry;

/** Follows the daemon while the page is in view: a browser opens few connections to a host, for all its tabs together. */
function connect() {
  stream?.close();
  clearTimeout(retry);
  if (document.hidden) return;
  const source = new EventSource('api/stream');
  stream = source;
  source.addEventListener('open', () => announce($('connection'), 'Live'));
  source.addEventListener('message', (message) => take(JSON.parse(message.data)));
  source.addEventListener('error', () => {
    if (source.readyState !== EventSource.CLOSED) {
      announce($('connection'), 'Reconnecting');
      return;
    }
    announce($('connection'), 'Updates every 5 seconds');
    load('status').then(take, (error) => announce($('connection'), `No connection: ${error.message}`));
    retry = setTimeout(connect, 5000);
  });
}

function begin() {
  $('images-filter').addEventListener('submit', (event) => event.preventDefault());
  let typed = 0;
  $('filter').addEventListener('input', () => {
    clearTimeout(typed);
    state.offset = 0;
    typed = setTimeout(loadImages, 250);
  });
  for (const header of $('images-table').querySelectorAll('th[data-sort]')) {
    header.querySelector('button').addEventListener('click', () => {
      state.ascending = state.sort === header.dataset.sort ? !state.ascending : header.dataset.sort === 'name';
      [state.sort, state.offset] = [header.dataset.sort, 0];
      loadImages();
    });
  }
  const turn = (button, change) => $(button).addEventListener('click', change);
  turn('images-previous', () => { state.offset = Math.max(0, state.offset - PAGE_ROWS); loadImages(); });
  turn('images-next', () => { state.offset += PAGE_ROWS; loadImages(); });
  turn('gc-previous', () => { state.removalsOffset = Math.max(0, state.removalsOffset - 100); loadRemovals(); });
  turn('gc-next', () => { state.removalsOffset += 100; loadRemovals(); });
  turn('explain-close', () => $('explain').close());
  const whileVisible = (load) => () => { if (!document.hidden) load(); };
  setInterval(whileVisible(loadDisk), 60000);
  setInterval(whileVisible(refreshImages), 60000);
  document.addEventListener('visibilitychange', connect);
  document.addEventListener('visibilitychange', whileVisible(loadDisk));
  document.addEventListener('visibilitychange', whileVisible(refreshImages));
  loadDisk();
  connect();
}

begin();
