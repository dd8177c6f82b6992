// Figures in frames: as high as their content, and in the site's light or dark scheme.
const frames = () => [...document.querySelectorAll("iframe.figure")];
const tell = frame => frame.contentWindow?.postMessage(
  {theme: document.body.getAttribute("data-md-color-scheme") === "slate" ? "dark" : "light"}, "*");
window.addEventListener("message", event => {
  const frame = frames().find(one => one.contentWindow === event.source);
  if (!frame || !(event.data?.height > 0)) return;
  frame.style.height = `${Math.min(event.data.height, 6000)}px`;
  tell(frame);
});
new MutationObserver(() => frames().forEach(tell)).observe(document.body, {attributes: true, attributeFilter: ["data-md-color-scheme"]});
