/* The order of search results: guides come before the reference, which comes before the C
 * API and development. */
"use strict";

const forDevelopers = /^(bench|src|tests)\/|^docs\/(design|decisions|reference\/c)$|^(CHANGELOG|CONTRIBUTING)$/;

/* Sphinx does not count words, so each page that has a word once is as good as the page
 * about it.  These are the pages about words that are not in their titles. */
const about = {
  "docs/asyncio": /\b(asyncio|await|coroutines?)\b/,
  "docs/beyond-memory": /\b(optimizers?|offload|activations?)\b/,
  "docs/checkpoints": /\b(checkpoints?|resume)\b/,
  "docs/distributed": /\b(machines|ranks?|fsdp|dcp)\b/,
  "docs/environment": /\b(nvmeio_\w*|environment|variables?)\b/,
  "docs/processes": /\b(fork|pickle|spawn|multiprocessing|process(es)?)\b/,
  "docs/troubleshooting": /\b(denied|docker|errors?|errno|refused)\b/,
  "docs/tuning": /\b(fast(er)?|profiles?|slow(er)?)\b/,
};
const query = (new URLSearchParams(window.location.search).get("q") || "").toLowerCase();

var Scorer = {
  score: ([docname, title, anchor, descr, score]) => {
    if (forDevelopers.test(docname) || /^C | parameter,/.test(descr || ""))
      return score - 20;
    if (about[docname]?.test(query)) return score + 15;
    if (!docname.startsWith("docs/reference/")) return score;
    // A word in the text of a page, or in its title, rather than the name of an object.
    if (!descr) return score - 4;
    // nvmeio.save comes before nvmeio.torch.save, and that before nvmeio.aio.save.
    const parts = title.split(".");
    return score - parts.length / 10 - (parts[1] === "aio") / 20;
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
