"use strict";
for (const button of document.querySelectorAll("button[data-all]")) {
  button.hidden = false;
  button.addEventListener("click", () => {
    for (const box of button.closest("fieldset").querySelectorAll("input[data-curve]")) {
      box.checked = button.dataset.all === "yes";
    }
  });
}
