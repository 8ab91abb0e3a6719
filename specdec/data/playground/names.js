// A slider's handle is called what its label says, so that a screen reader can say it.
const root = this.closest('.sp');
const name = () => root.querySelectorAll('.widget-hslider').forEach(row => {
  const label = row.querySelector('.widget-label')?.textContent;
  row.querySelectorAll('.noUi-handle').forEach(
    handle => { if (label && handle.ariaLabel !== label) handle.ariaLabel = label; });
});
new MutationObserver(name).observe(root, {childList: true, subtree: true});
name();
