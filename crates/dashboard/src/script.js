// Refreshes the changed parts of the page, and filters tables while the user types. The page
// is complete without this script.
'use strict';

const main = document.getElementById('main');
const box = document.getElementById('q');
const found = document.getElementById('found');
const connection = document.getElementById('connection');

// The dashboard answers within 3 s. A tunnel whose other end is gone never answers.
const ANSWER_MS = 10000;

function filter() {
  if (!box) return;
  const words = box.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  let all = 0;
  for (const row of main.querySelectorAll('tbody tr')) {
    const text = row.textContent.toLowerCase();
    row.hidden = !words.every((word) => text.includes(word));
    all += 1;
    shown += row.hidden ? 0 : 1;
  }
  const said = words.length ? `${shown} of ${all}` : '';
  if (found.textContent !== said) found.textContent = said;
}

// A selector for the focused element that matches the same element in the new page.
function named(element) {
  if (!element) return null;
  if (element.id) return `#${CSS.escape(element.id)}`;
  const href = element.getAttribute('href');
  if (href) return `a[href="${CSS.escape(href)}"]`;
  const parent = element.parentElement;
  if (element.matches('summary') && parent.id) return `#${CSS.escape(parent.id)} > summary`;
  // A table that scrolls.
  const label = element.getAttribute('aria-label');
  return label ? `[aria-label="${CSS.escape(label)}"]` : null;
}

function selecting(within) {
  const selection = document.getSelection();
  return selection && !selection.isCollapsed && within.contains(selection.anchorNode);
}

function replace(old, fresh) {
  // An element that is being pressed must not be replaced before it is released.
  if (old.isEqualNode(fresh) || old.matches(':active') || selecting(old)) return;
  const focus = old.contains(document.activeElement) ? named(document.activeElement) : null;
  for (const open of old.querySelectorAll('details[open]')) {
    const same = open.id && fresh.querySelector(`#${CSS.escape(open.id)}`);
    if (same) same.open = true;
  }
  const scrolls = [...old.querySelectorAll('.scroll')].map((one) => one.scrollLeft);
  old.replaceChildren(...fresh.childNodes);
  old.querySelectorAll('.scroll').forEach((one, n) => { one.scrollLeft = scrolls[n] || 0; });
  const again = focus && old.querySelector(focus);
  if (again) again.focus({ preventScroll: true });
}

async function refresh(address) {
  const signal = AbortSignal.timeout(ANSWER_MS);
  const answer = await fetch(address, { cache: 'no-store', redirect: 'error', signal });
  if (!answer.ok) throw new Error(answer.statusText);
  const page = new DOMParser().parseFromString(await answer.text(), 'text/html');
  for (const old of document.querySelectorAll('[data-live]')) {
    const fresh = page.getElementById(old.id);
    if (fresh) replace(old, document.importNode(fresh, true));
  }
  // The status that screen readers read out is replaced only if it has changed.
  const status = document.getElementById('status');
  const said = page.getElementById('status');
  if (status && said && status.textContent !== said.textContent) {
    status.textContent = said.textContent;
  }
  filter();
}

async function keep(everyMs) {
  // Requests all rows, because the filter runs here.
  const address = location.pathname + (box ? '' : location.search);
  for (;;) {
    await new Promise((done) => setTimeout(done, everyMs));
    if (document.hidden) continue;
    try {
      await refresh(address);
      connection.hidden = true;
    } catch {
      connection.hidden = false;
    }
  }
}

if (box) box.addEventListener('input', filter);
filter();
if (main.dataset.every) keep(Number(main.dataset.every) * 1000);
