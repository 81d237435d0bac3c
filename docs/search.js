/* Search for options as they are spelled: a dash in front of a word would exclude it. */
document.addEventListener("input", event => {
  if (event.target.matches(".md-search__input"))
    event.target.value = event.target.value.replace(/(^|\s)-+/g, "$1")
}, true)
