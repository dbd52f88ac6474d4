/* The order of search results: guides come before the reference, which comes before the C
 * API and development. */
"use strict";

const forDevelopers = /^(bench|src|tests)\/|^docs\/(design|decisions|reference\/c)$|^(CHANGELOG|CONTRIBUTING)$/;

var Scorer = {
  score: ([docname, title, anchor, descr, score]) => {
    if (forDevelopers.test(docname) || /^C | parameter,/.test(descr || ""))
      return score - 20;
    // A word in the text of a page, or in its title, rather than the name of an object.
    return docname.startsWith("docs/reference/") && !descr ? score - 4 : score;
  },
  // The values of Sphinx, which fills in none that is missing.
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

/* Search for "Ctrl-C" by "Ctrl": a single letter is on every page. */
var splitQuery = (query) => {
  const words = query.split(/[^\p{Letter}\p{Number}_]+/gu).filter((word) => word);
  const longer = words.filter((word) => word.length > 1);
  return longer.length ? longer : words;
};
