/* The order of search results: pages for users come before the C API and development. */
"use strict";

const forDevelopers = /^(bench|src|tests)\/|^docs\/(design|decisions|reference\/c)$|^(CHANGELOG|CONTRIBUTING)$/;

var Scorer = {
  score: ([docname, title, anchor, descr, score]) =>
    forDevelopers.test(docname) || /^C | parameter,/.test(descr || "")
      ? score - 20
      : score,
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
