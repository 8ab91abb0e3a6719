// Arrow keys, Home and End walk from token to token, Enter clicks; the Tab key comes back to where one was.
const tokens = [...this.querySelectorAll('[data-tip]')];
const here = tokens.indexOf(document.activeElement);
const there = {ArrowRight: here + 1, ArrowLeft: here - 1, Home: 0, End: tokens.length - 1}[event.key];
if (here >= 0 && event.key === 'Enter') tokens[here].click();
if (here >= 0 && tokens[there]) {
  event.preventDefault();
  event.stopPropagation();
  tokens[here].tabIndex = -1;
  tokens[there].tabIndex = 0;
  tokens[there].focus();
}
