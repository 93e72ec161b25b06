"""The text whose likelihood is compared: written for this repository, a few hundred tokens."""

from __future__ import annotations

PARAGRAPH = (
    "Before the bridge was built, everything that crossed the river went by ferry. The boat was "
    "not fast, but it was exact. Each crate had a number painted on its lid, and the same number "
    "stood in two books, one kept on the north bank and one on the south. When the boat came in, "
    "the clerk read the numbers aloud while the porter touched each crate, and only when both "
    "agreed was the crate carried up the stairs. If a lid was loose or a number could not be "
    "read, the crate stayed on the boat and went back, and a short note went with it. People who "
    "saw this for the first time found it slow. They asked why the clerk did not simply trust the "
    "man who had packed the goods. The clerk used to answer that he trusted him completely, and "
    "that this was the reason why he counted: a mistake that is found at the landing costs a "
    "minute, and a mistake that is found in the market costs a friend. In the winter of the great "
    "flood the river rose by three metres in one night. Two boats were lost, and with them eleven "
    "crates. By the evening of the next day every owner had been told which of his goods were "
    "gone, which were safe, and which were still waiting on the other side, because the two books "
    "were dry and said the same thing."
)
