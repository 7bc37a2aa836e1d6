// Runs before the first paint: the colours that were chosen, if they are not the system's.
document.documentElement.dataset.theme = localStorage.getItem("theme") ?? "auto";
