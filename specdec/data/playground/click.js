// A click on a token, or Enter, puts it under the microscope: its round and position go into a field that the panel reads.
const at = event.target.closest('[data-at]')?.dataset.at;
const field = this.closest('.sp')?.querySelector('.sp-picked input');
if (at && field) {
  field.value = at;
  for (const type of ['input', 'change']) field.dispatchEvent(new Event(type, {bubbles: true}));
}
