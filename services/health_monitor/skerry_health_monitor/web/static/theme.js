// Before the first paint, so that nobody sees the other theme flash by.
"use strict";
(() => {
  let wanted = null;
  try { wanted = localStorage.getItem("skerry-theme"); } catch { /* storage may be forbidden */ }
  if (wanted === "light" || wanted === "dark") document.documentElement.dataset.theme = wanted;
})();
