"""Documents name files and headings that exist, and the counts of their English see what they should."""

from house import prose


def test_every_link_leads_somewhere() -> None:
    assert not prose.dead_links()


def test_every_source_file_that_is_named_exists() -> None:
    assert not prose.dead_paths()


def test_a_paragraph_is_split_into_its_sentences() -> None:
    text = "# A title\n\n- **It is read.** quantkit reads [the file](a.md), e.g. `x.py`.\n  It writes 3.5 MB. Done?\n"
    (paragraph,) = prose.paragraphs(f"{text}\n| a table. With a stop |\n")
    split = ["**It is read.", "quantkit reads (the file), e.g `x.py`.", "It writes 3.5 MB.", "Done?"]
    assert prose.sentences(paragraph) == split


def test_a_subject_that_is_a_clause_is_seen() -> None:
    assert prose.opens_with_clause("**What is read is checked.")
    assert prose.opens_with_clause("Whoever holds a lock waits.")
    assert not prose.opens_with_clause("What is checked?")
    assert not prose.opens_with_clause("(What runs where) lists every format.")
    assert not prose.opens_with_clause("Files are checked by what they hold.")
