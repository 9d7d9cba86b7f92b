"use strict";
// Every clip is one image of all its frames. One clock moves all of them, so that they are always at the same frame.
(() => {
  const viewer = document.getElementById("viewer");
  if (!viewer) return;
  const row = document.getElementById("pick-row");
  const picture = document.getElementById("pick-picture");
  const play = document.getElementById("play");
  const slider = document.getElementById("frame");
  const number = document.getElementById("number");
  const shown = document.getElementById("shown");
  const button = (r, p) => document.querySelector(`button[data-row="${r}"][data-picture="${p}"]`);
  const frames = Number(slider.max) + 1;
  const fps = Number(viewer.dataset.fps);
  let playing = !matchMedia("(prefers-reduced-motion: reduce)").matches;
  let frame = 0;
  let due = 0;

  function draw() {
    for (const image of document.querySelectorAll(".film img")) {
      const columns = Number(image.dataset.columns);
      const at = Math.min(frame, Number(image.dataset.frames) - 1);
      const x = (at % columns) / columns;
      const y = Math.floor(at / columns) / Number(image.dataset.rows);
      image.style.transform = `translate(${-100 * x}%, ${-100 * y}%)`;
    }
    slider.value = frame;
    number.textContent = `${frame + 1} / ${frames}`;
  }

  function tick(now) {
    if (!playing) return;
    if (now >= due) {
      frame = (frame + 1) % frames;
      due = (now - due > 1000 / fps ? now : due) + 1000 / fps;
      draw();
    }
    requestAnimationFrame(tick);
  }

  function set(state) {
    playing = state;
    play.textContent = playing ? "Pause" : "Play";
    due = 0;
    if (playing) requestAnimationFrame(tick);
  }

  function show() {
    for (const pressed of document.querySelectorAll('button[aria-pressed="true"]')) pressed.removeAttribute("aria-pressed");
    const chosen = button(row.value, picture.value);
    chosen.setAttribute("aria-pressed", "true");
    for (const [id, source] of [["left", button(row.value, 0)], ["right", chosen]]) {
      const film = source.querySelector(".film");
      const target = document.getElementById(id);
      target.style.cssText = film.style.cssText;
      target.replaceChildren(film.querySelector("img").cloneNode());
    }
    const [title, ...figures] = chosen.parentElement.querySelector("figcaption").innerText.split("\n");
    shown.textContent = `${title}: ${figures.join(" · ")}`;
    draw();
  }

  row.addEventListener("change", show);
  picture.addEventListener("change", show);
  play.addEventListener("click", () => set(!playing));
  slider.addEventListener("input", () => {
    set(false);
    frame = Number(slider.value);
    draw();
  });
  for (const each of document.querySelectorAll("button[data-row]")) {
    each.addEventListener("click", () => {
      row.value = each.dataset.row;
      if (each.dataset.picture !== "0") picture.value = each.dataset.picture;
      show();
      viewer.scrollIntoView({ block: "nearest" });
    });
  }
  if (picture.options.length === 0) {
    draw();
    return;
  }
  viewer.hidden = false;
  show();
  set(playing);
})();
