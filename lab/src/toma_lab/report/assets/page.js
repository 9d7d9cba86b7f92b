"use strict";
// The viewer borrows the images of the rows below it, so that the page holds each only once.
(() => {
  const viewer = document.getElementById("viewer");
  if (!viewer) return;
  const row = document.getElementById("pick-row");
  const picture = document.getElementById("pick-picture");
  const cut = document.getElementById("cut");
  const under = document.getElementById("under");
  const over = document.getElementById("over");
  const shown = document.getElementById("shown");
  const button = (r, p) => document.querySelector(`button[data-row="${r}"][data-picture="${p}"]`);

  function show() {
    for (const pressed of document.querySelectorAll('button[aria-pressed="true"]')) pressed.removeAttribute("aria-pressed");
    const chosen = button(row.value, picture.value);
    chosen.setAttribute("aria-pressed", "true");
    for (const [target, source] of [[under, button(row.value, 0)], [over, chosen]]) {
      const image = source.querySelector("img");
      target.src = image.src;
      target.alt = image.alt;
    }
    const [title, ...figures] = chosen.parentElement.querySelector("figcaption").innerText.split("\n");
    shown.textContent = `${title}: ${figures.join(" · ")}`;
  }

  row.addEventListener("change", show);
  picture.addEventListener("change", show);
  cut.addEventListener("input", () => cut.parentElement.style.setProperty("--cut", `${cut.value}%`));
  for (const each of document.querySelectorAll("button[data-row]")) {
    each.addEventListener("click", () => {
      row.value = each.dataset.row;
      if (each.dataset.picture !== "0") picture.value = each.dataset.picture;
      show();
      viewer.scrollIntoView({ block: "nearest" });
    });
  }
  if (picture.options.length === 0) return;
  viewer.hidden = false;
  show();
})();
