// The console's own script: live updates, ages, keyboard, selection, notifications. Pages are made on
// the server; nothing here makes HTML of data.
(() => {
  "use strict";
  const body = document.body;
  const byId = (id) => document.getElementById(id);
  const all = (selector) => [...document.querySelectorAll(selector)];

  // -- live updates (the events: engine/fumehood/web/app.py) --------------------------------------

  const RETRY_MS = 2000;
  const LONG_MS = 60000;
  let source = null;
  let pending = null;
  let away = ""; // what does not answer: "engine" or "console"
  let isLong = false;
  let longAway = null;
  let told = 0;

  function listen() {
    if (!body.dataset.live || source) return;
    source = new EventSource(body.dataset.live);
    source.addEventListener("approvals", (event) => {
      const now = JSON.parse(event.data).pending;
      showAway("");
      showPending(now);
      told += 1;
      htmx.trigger(body, "live-approvals");
    });
    source.addEventListener("tick", () => htmx.trigger(body, "live-tick"));
    source.addEventListener("away", () => showAway("engine"));
    source.addEventListener("paused", () => stop(true));
    source.addEventListener("logged-out", () => location.assign("/login"));
    source.addEventListener("error", () => {
      if (!source) return;
      showAway("console");
      if (source.readyState !== EventSource.CLOSED) return; // else the browser tries again
      stop(false);
      setTimeout(listen, RETRY_MS);
    });
  }

  function stop(isPaused) {
    source.close();
    source = null;
    byId("paused").hidden = !isPaused;
  }

  function showAway(what) {
    byId("away").hidden = !what;
    if (away && !what && document.querySelector("[data-reload-when-back]")) location.reload();
    if (!away !== !what) {
      clearTimeout(longAway);
      isLong = false;
      if (what) longAway = setTimeout(() => { isLong = true; sayAway(); }, LONG_MS);
    }
    away = what;
    sayAway();
  }

  function sayAway() {
    const which = isLong ? away : "now";
    for (const words of byId("away").children) words.hidden = words.dataset.away !== which;
  }

  function showPending(now) {
    for (const badge of all("[data-pending]")) {
      badge.textContent = now;
      badge.hidden = !now;
    }
    const title = document.title.replace(/^\(\d+\) /, "");
    document.title = now ? `(${now}) ${title}` : title;
    if (pending !== null && now > pending) notify(now);
    pending = now;
  }

  document.addEventListener("visibilitychange", () => {
    if (document.hidden || source) return;
    byId("paused").hidden = true;
    listen();
  });

  // -- notifications -------------------------------------------------------------------------------

  const canNotify = "Notification" in window && body.dataset.live;
  const wish = all("[data-notify]")[0];
  if (wish && canNotify) {
    wish.hidden = Notification.permission !== "default";
    wish.addEventListener("click", () =>
      Notification.requestPermission().then(() => { wish.hidden = true; }));
  }

  function notify(count) {
    if (!canNotify || Notification.permission !== "granted" || !document.hidden) return;
    // No text of an agent's: a notification is shown outside the page.
    const told = new Notification("fumehood", {
      body: count === 1 ? "A call waits for you." : `${count} calls wait for you.`, tag: "fumehood",
    });
    told.addEventListener("click", () => { window.focus(); told.close(); });
  }

  // -- ages ----------------------------------------------------------------------------------------

  const UNITS = [["d", 86400], ["h", 3600], ["m", 60]];

  function showAges() {
    for (const element of all("time[data-age]")) {
      const seconds = Math.trunc((Date.parse(element.dateTime) - Date.now()) / 1000);
      const size = Math.abs(seconds);
      const unit = UNITS.find(([, length]) => size >= 2 * length);
      const words = unit ? `${Math.floor(size / unit[1])} ${unit[0]}` : `${size} s`;
      element.textContent = !size ? "now" : seconds > 0 ? `in ${words}` : `${words} ago`;
    }
  }
  setInterval(showAges, 5000);

  // -- selection: kept while the list is made anew -------------------------------------------------

  const chosen = new Set();
  const boxes = () => all("#cards input[name=item]");

  function showSelection() {
    const bar = byId("selection");
    if (!bar) return;
    bar.hidden = chosen.size === 0;
    bar.querySelector("[data-selected]").textContent = chosen.size;
  }

  function restore() {
    const there = new Set(boxes().map((box) => box.value));
    for (const value of chosen) if (!there.has(value)) chosen.delete(value);
    for (const box of boxes()) box.checked = chosen.has(box.value);
    showSelection();
    showOpen();
  }

  function clearSelection() {
    chosen.clear();
    for (const box of boxes()) box.checked = false;
    showSelection();
  }

  // -- the open approval ---------------------------------------------------------------------------

  const open = () => document.querySelector("[data-open]")?.dataset.open;

  let place = -1; // where it is in the list, or was, once it is decided

  function showOpen() {
    const id = open() || document.querySelector("[data-panel]")?.dataset.panel.split("/").pop();
    rows().forEach((row, number) => {
      if (row.dataset.id !== id) return row.removeAttribute("aria-current");
      row.setAttribute("aria-current", "true");
      place = number;
    });
  }

  document.addEventListener("change", (event) => {
    if (event.target.name !== "item" || !event.target.closest("#cards")) return;
    if (event.target.checked) chosen.add(event.target.value);
    else chosen.delete(event.target.value);
    showSelection();
  });

  // An argument that somebody writes is given.
  document.addEventListener("input", (event) => {
    const given = event.target.closest(".field")?.querySelector(".given input");
    if (given && event.target !== given) given.checked = true;
  });

  document.addEventListener("click", (event) => {
    const target = event.target.closest("[data-unselect], [data-help], [data-palette]");
    if (!target) return;
    if (target.matches("[data-palette]")) {
      event.preventDefault(); // without this script it is a link to a page
      showPalette();
    } else if (target.matches("[data-help]")) byId("help").showModal();
    else clearSelection();
  });

  let focused = null;
  let lastOpen = null;
  const UPDATES = ".approval, .nothing"; // what fetches itself again
  const UNREAD_MS = 1000;
  let asked = null; // the newest request for what is shown beside the list, updates aside
  // A row that is replaced between press and release gets no click: updates wait for the release. A
  // menu or another window may swallow the release.
  let isPressed = false;
  const due = new Set();
  function release() {
    isPressed = false;
    for (const event of due) htmx.trigger(body, event);
    due.clear();
  }
  document.addEventListener("pointerdown", (event) => { isPressed = event.button === 0; });
  for (const end of ["pointerup", "pointercancel", "contextmenu"]) {
    document.addEventListener(end, () => setTimeout(release)); // after the click
  }
  window.addEventListener("blur", release);

  body.addEventListener("htmx:beforeSwap", (event) => {
    const { target, xhr, requestConfig: { elt, triggeringEvent } } = event.detail;
    if (isPressed && triggeringEvent?.type.startsWith("live-")) {
      event.detail.shouldSwap = false;
      due.add(triggeringEvent.type);
    }
    // A late answer must not take the place of what was opened meanwhile: a key would decide it.
    const isLate = elt.matches(UPDATES) ? !elt.isConnected : xhr !== asked;
    if (target.id === "detail" && isLate) event.detail.shouldSwap = false;
    if (target.id !== "list") return;
    focused = document.activeElement?.closest("#cards .item")?.querySelector(".row")?.dataset.id;
  });

  body.addEventListener("htmx:afterSwap", (event) => {
    const target = event.detail.target;
    showAges();
    if (target.id === "list") {
      restore();
      if (focused) rows().find((row) => row.dataset.id === focused)?.focus({ preventScroll: true });
    } else if (target.id === "detail") {
      const main = byId("main");
      main.classList.toggle("has-open", !target.querySelector(".nothing"));
      if (target.querySelector("[data-unselect-all]")) clearSelection();
      if (!open() || open() !== lastOpen) target.scrollTop = 0;
      lastOpen = open();
      showOpen();
      if (target.querySelector(".result")) holdBack(target);
      const field = ":is(textarea, select, input:not([type=hidden], [type=checkbox]))";
      const first = target.querySelector(`.panel ${field}`);
      first?.focus({ preventScroll: true });
    } else if (target.id === "notices") {
      setTimeout(() => target.replaceChildren(), 8000);
    }
  });

  // The next call opens by itself: a second click or key was meant for the one before.
  function holdBack(detail) {
    const buttons = [...detail.querySelectorAll(".approval .actions button:not(:disabled)")];
    for (const button of buttons) button.disabled = true;
    setTimeout(() => { for (const button of buttons) button.disabled = false; }, UNREAD_MS);
  }

  // A change while an approval or a result was fetched: its request was lost with the old part.
  body.addEventListener("htmx:beforeRequest", (event) => {
    const { elt, target, xhr } = event.detail;
    xhr.told = told;
    if (target.id === "detail" && !elt.matches(UPDATES)) asked = xhr;
  });
  body.addEventListener("htmx:afterSettle", (event) => {
    const { target, xhr } = event.detail;
    const isLate = target.matches("#detail, .result") && xhr.told !== told;
    if (isLate) htmx.trigger(body, "live-approvals");
  });

  body.addEventListener("htmx:sendError", () => showAway("console"));

  // -- addresses -----------------------------------------------------------------------------------

  // Filters that are left empty do not stand in the address.
  document.addEventListener("formdata", (event) => {
    if (!event.target.matches(".filters")) return;
    for (const [name, value] of [...event.formData]) if (!value) event.formData.delete(name);
  });

  // -- keyboard ------------------------------------------------------------------------------------

  const rows = () => all("#cards .row");

  function move(step) {
    const found = rows();
    if (!found.length) return;
    const active = document.activeElement?.closest(".row");
    const from = found.findIndex((row) => row === active || (!active && row.ariaCurrent === "true"));
    const none = place < 0 ? (step > 0 ? 0 : found.length - 1) : place - (step < 0);
    const to = from < 0 ? none : from + step;
    const next = found[Math.min(Math.max(to, 0), found.length - 1)];
    next.focus();
    next.click();
  }

  const KEYS = {
    j: () => move(1),
    k: () => move(-1),
    x: () => {
      const row = document.activeElement?.closest(".row") || document.querySelector(".row[aria-current]");
      row?.closest(".item").querySelector("input[name=item]")?.click();
    },
    "/": () => {
      const [search] = all("[data-search]");
      if (search) search.focus();
      else showPalette();
    },
    g: () => showPalette(),
    "?": () => byId("help").showModal(),
  };

  function showPalette() {
    byId("palette").showModal();
    const words = byId("palette-words");
    words.select();
    words.focus();
    htmx.trigger(words, "palette");
  }

  function goBack() {
    const asks = document.querySelector(".confirm[open]");
    if (asks) return asks.removeAttribute("open");
    const back = document.querySelector("[data-back]");
    if (back) back.click();
  }

  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || all("dialog[open]").length) return;
    const typing = event.target.closest("input:not([type=checkbox]), textarea, select");
    if (event.key === "Escape") {
      if (typing) typing.blur();
      else goBack();
      return;
    }
    if (event.key === "Enter" && typing && !event.isComposing) {
      const sends = typing.matches("[data-enter-sends]") && !event.shiftKey;
      if (sends || (event.repeat && typing.matches("input"))) event.preventDefault();
      if (sends && !event.repeat) typing.form.requestSubmit(); // a held key decides nothing twice
      return;
    }
    if (typing || !body.dataset.live) return;
    // With a selection, no key decides on the open call alone.
    const isForAll = chosen.size && ["a", "d"].includes(event.key);
    const ofKey = () => all(`[data-key="${CSS.escape(event.key)}"]:not(:disabled)`).find((one) => one.checkVisibility());
    const button = isForAll ? document.querySelector("[data-together]") : ofKey();
    const act = KEYS[event.key];
    if (!button && !act) return;
    event.preventDefault();
    if (event.repeat && button) return; // a held key decides nothing twice
    if (button && document.querySelector(".row.htmx-request")) return; // meant for the next call
    if (button?.matches(".confirm[open] > summary")) return; // it is asked already
    if (button) button.click();
    else act();
  });

  // -- start ---------------------------------------------------------------------------------------

  for (const form of all("form[data-submit]")) form.requestSubmit();
  document.querySelector(".nav [aria-current]")?.scrollIntoView({ block: "nearest" }); // on a phone
  showAges();
  restore();
  listen();
})();
