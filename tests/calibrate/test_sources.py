import io
import json

import pytest

from quantkit.calibrate.tokens.sources import Conversations, Ids, Texts, parse, read, read_dataset
from quantkit.errors import InputError


def lines(*records: object) -> bytes:
    return "".join(json.dumps(record) + "\n" for record in records).encode()


def parquet(**columns: object) -> bytes:
    import pyarrow
    import pyarrow.parquet

    buffer = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), buffer)
    return buffer.getvalue()


def test_text_is_parted_at_blank_lines():
    data = "\ufeffone\nstill one\r\n \r\ntwo\n\n\n\nthree\n".encode()
    assert parse(data, suffix=".txt", where="a.txt") == Texts(("one\nstill one", "two", "three"))


def test_a_jsonl_gives_its_distinct_texts():
    # a line separator inside a string does not end the line
    data = '{"text": "a\u2028b", "id": 3}\n\n{"text": ""}\n{"text": "c"}\n{"text": "c"}'.encode()
    assert parse(data, suffix=".jsonl", where="a.jsonl") == Texts(("a\u2028b", "c"))


@pytest.mark.parametrize(
    "data, suffix",
    [
        (lines({"input_ids": [1, 2]}, {"input_ids": [3], "text": "kept aside"}), ".jsonl"),
        (lines([1, 2], [3]), ".jsonl"),
        (b"[[1, 2], [3]]", ".json"),
        (parquet(input_ids=[[1, 2], [3]], text=["x", "y"]), ".parquet"),
    ],
)
def test_token_ids_are_read_unchanged(data, suffix):
    found = parse(data, suffix=suffix, where="a")
    assert isinstance(found, Ids)
    assert found.rows == ([1, 2], [3])


TALK = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}]
CALL = [{"role": "assistant", "tool_calls": [{"name": "look"}]}, {"role": "user", "content": [{"type": "text"}]}]


def test_a_jsonl_gives_its_distinct_conversations():
    found = parse(lines({"messages": TALK}, {"messages": TALK}, {"messages": CALL}), suffix=".jsonl", where="a.jsonl")
    assert found == Conversations((TALK, CALL), ("a.jsonl:1", "a.jsonl:3"))


@pytest.mark.parametrize("chat", [False, True])
def test_of_a_text_and_its_messages_the_one_that_will_be_written_is_taken(chat):
    data = lines({"text": "Why? Because.", "messages": TALK})
    expected = Conversations((TALK,), ("a.jsonl:1",)) if chat else Texts(("Why? Because.",))
    assert parse(data, suffix=".jsonl", where="a.jsonl", chat=chat) == expected
    table = parquet(text=["Why? Because."], messages=[TALK])
    found = parse(table, suffix=".parquet", where="a", chat=chat)
    assert found == (Conversations((TALK,), ("a: row 0",)) if chat else expected)


def test_a_table_has_every_key_in_every_row_and_what_is_null_is_not_there():
    found = parse(parquet(messages=[[{**TALK[0], "name": "x"}, TALK[1]]]), suffix=".parquet", where="a")
    assert isinstance(found, Conversations)
    assert found.items == ([{**TALK[0], "name": "x"}, TALK[1]],)


def test_a_dataset_of_conversations(tmp_path):
    import datasets

    datasets.Dataset.from_dict({"prompt": ["x"], "messages": [TALK]}).save_to_disk(tmp_path)
    found, own_splits = read_dataset(tmp_path, "calib", where="d", chat=True)
    assert isinstance(found, Conversations)
    assert (found.items, own_splits) == ((TALK,), False)


@pytest.mark.parametrize(
    "messages",
    [
        [],
        "Why?",
        ["Why?"],
        [{"role": "user", "value": "Why?"}],
        [{"from": "human", "value": "Why?"}],
        [{"role": "user", "content": None}],
        [{"role": 1, "content": "Why?"}],
    ],
)
def test_what_is_no_conversation_is_named(messages):
    data = lines({"messages": TALK}, {"messages": messages})
    with pytest.raises(InputError, match=r"calibration-messages.*a\.jsonl:2"):
        parse(data, suffix=".jsonl", where="a.jsonl")


def test_parquet_of_text():
    assert parse(parquet(text=["a", "b"], n=[1, 2]), suffix=".parquet", where="a") == Texts(("a", "b"))


@pytest.mark.parametrize(
    "data, suffix, code, message",
    [
        (b"", ".txt", "calibration-empty", "a.txt"),
        (b" \n\t\n", ".txt", "calibration-empty", "a\\."),
        (b"", ".parquet", "calibration-empty", "a\\."),
        (b'{"text": " "}', ".jsonl", "calibration-empty", "a\\."),
        (b"[]", ".json", "calibration-empty", "a\\."),
        (b"fine \xff\xfe", ".txt", "calibration-not-text", "0xff at 5"),
        ("utf-16".encode("utf-16"), ".txt", "calibration-not-text", "UTF-8"),
        (b"PK\x03\x04\x00\x00", ".txt", "calibration-not-text", "zero byte"),
        (b"\x89PNG", ".jsonl", "calibration-not-text", "a\\."),
        (b"text", ".docx", "calibration-suffix", ".txt, .jsonl"),
        (b"text", "", "calibration-suffix", "without a suffix"),
        (b'{"text": "a"}\n{"text": ', ".jsonl", "calibration-json", "a.jsonl:2"),
        (b"[" * 100_000, ".jsonl", "calibration-json", "a\\."),
        (b'{"a": 1}', ".json", "calibration-json", "not a list"),
        (b'{"text": "a"}\n\n{"txt": "b", "n": 1}', ".jsonl", "calibration-fields", "a.jsonl:3.*'txt': str, 'n': int"),
        (b'{"text": 5}', ".jsonl", "calibration-fields", "'text': int"),
        (b'"just a string"', ".jsonl", "calibration-fields", "a\\."),
        (b'{"text": "a"}\n{"input_ids": [1]}', ".jsonl", "calibration-mixed", "a.jsonl:2"),
        (b'{"text": "a"}\n{"messages": [{"role": "u", "content": "b"}]}', ".jsonl", "calibration-mixed", "a.jsonl:2"),
        (b'{"messages": [{"role": "u", "content": "\\ud800"}]}', ".jsonl", "calibration-not-text", "a.jsonl:1"),
        (b'{"input_ids": [1, 2.5]}', ".jsonl", "calibration-ids", "2.5"),
        (b'{"input_ids": [1, true]}', ".jsonl", "calibration-ids", "True"),
        (b'{"input_ids": "1 2"}', ".jsonl", "calibration-ids", "a\\."),
        (b'{"input_ids": [[1, 2]]}', ".jsonl", "calibration-ids", "a\\."),
        (b"PAR1 not really", ".parquet", "calibration-unreadable", "a\\."),
    ],
)
def test_a_bad_file_is_refused_in_one_line(data, suffix, code, message):
    with pytest.raises(InputError, match=message) as caught:
        parse(data, suffix=suffix, where=f"a{suffix}")
    assert caught.value.code == code
    assert "\n" not in str(caught.value)


def test_parquet_without_the_column():
    with pytest.raises(InputError, match="'body', 'n'") as caught:
        parse(parquet(body=["a"], n=[1]), suffix=".parquet", where="a")
    assert caught.value.code == "calibration-fields"
    with pytest.raises(InputError, match="row 1"):
        parse(parquet(text=["a", None]), suffix=".parquet", where="a")


def test_dataset_folder(tmp_path):
    import datasets

    train = datasets.Dataset.from_dict({"text": ["a", "b"], "n": [1, 2]})
    test = datasets.Dataset.from_dict({"text": ["c"], "n": [3]})
    train.save_to_disk(tmp_path / "plain")
    datasets.DatasetDict({"train": train, "test": test}).save_to_disk(tmp_path / "splits")
    assert read_dataset(tmp_path / "plain", "calib", where="plain") == (Texts(("a", "b")), False)
    assert read_dataset(tmp_path / "splits", "eval", where="splits") == (Texts(("c",)), True)
    with pytest.raises(InputError, match=r"tune, validation.*test, train") as caught:
        read_dataset(tmp_path / "splits", "tune", where="splits")
    assert caught.value.code == "calibration-split"
    for shard in (tmp_path / "plain").glob("*.arrow"):
        shard.write_bytes(b"nothing of the kind")
    with pytest.raises(InputError, match=r"\[calibration-unreadable\]"):
        read_dataset(tmp_path / "plain", "calib", where="plain")


def test_half_a_surrogate_pair_is_no_text():
    with pytest.raises(InputError, match=r"a\.jsonl:2.*ud800, at 1") as caught:
        parse(b'{"text": "a"}\n{"text": "b\\ud800"}\n', suffix=".jsonl", where="a.jsonl")
    assert caught.value.code == "calibration-not-text"
    assert parse(b'{"text": "\\ud83d\\ude00"}', suffix=".jsonl", where="a") == Texts(("\U0001f600",))


SHAREGPT = {"conversations": [{"from": "human", "value": "Why?"}, {"from": "gpt", "value": "Because."}]}
ALPACA = {"instruction": "Why?", "input": "", "output": "Because."}


@pytest.mark.parametrize(
    "data, suffix",
    [
        (lines({"id": "1", **SHAREGPT}), ".jsonl"),
        (json.dumps([ALPACA]).encode(), ".json"),
        (lines({"conversations": TALK}), ".jsonl"),
        (parquet(id=["1"], conversations=[SHAREGPT["conversations"]]), ".parquet"),
        (parquet(**{key: [value] for key, value in ALPACA.items()}, text=["as prompted"]), ".parquet"),
        (b"instruction,input,output\nWhy?,,Because.\n", ".csv"),
    ],
)
def test_conversations_of_sharegpt_and_alpaca_are_messages(data, suffix):
    assert parse(data, suffix=suffix, where="a", chat=True).items == (TALK,)


def test_the_input_and_the_system_prompt_of_a_conversation_are_kept():
    found = parse(lines({**ALPACA, "input": "The sky."}), suffix=".jsonl", where="a").items[0]
    assert found[0]["content"] == "Why?\n\nThe sky."
    found = parse(lines({**SHAREGPT, "system": "Be brief."}), suffix=".jsonl", where="a").items[0]
    assert found == [{"role": "system", "content": "Be brief."}, *TALK]


@pytest.mark.parametrize("turns", ["Why?", [{"from": "human"}], [{"from": "human", "value": 5}], []])
def test_a_damaged_conversation_of_sharegpt_is_named(turns):
    with pytest.raises(InputError, match=r"a:1.*\{from, value\}") as caught:
        parse(lines({"conversations": turns}), suffix=".jsonl", where="a")
    assert caught.value.code == "calibration-messages"


def test_a_csv_is_read_by_its_columns():
    long = "word " * 40_000  # longer than a field that Python's csv module takes by itself
    data = f'id,text\n1,"one, ""two""\nthree"\n2,{long}\n\n3,\n'.encode()
    assert parse(data, suffix=".csv", where="a.csv") == Texts(('one, "two"\nthree', long))


@pytest.mark.parametrize(
    "data, suffix",
    [
        (b"id,body\n1,one\n2,two\n", ".csv"),
        (lines({"body": "one", "text": "not this"}, {"body": "two"}), ".jsonl"),
        (parquet(body=["one", "two"], text=["not", "this"]), ".parquet"),
    ],
)
def test_a_path_may_name_the_column(data, suffix, tmp_path):
    (tmp_path / f"a{suffix}").write_bytes(data)
    assert parse(data, suffix=suffix, where="a", column="body") == Texts(("one", "two"))
    part = read(f"{tmp_path}/a{suffix}:body", "calib", chat=False)
    assert part.content is not None and part.content.documents[0].startswith("one")
    with pytest.raises(InputError, match=r"no column .bodies.; .*body.*; write .*:body") as caught:
        read(f"{tmp_path}/a{suffix}:bodies", "calib", chat=False)
    assert caught.value.code == "calibration-fields"


@pytest.mark.parametrize("data", [b"id,text\n1\n", b"id,text\n1,a,b\n", b"id,body\n1,a\n", b'id,text\n1,"a\n'])
def test_a_csv_that_cannot_be_read_says_why(data):
    with pytest.raises(InputError, match=r"a\.csv") as caught:
        parse(data, suffix=".csv", where="a.csv")
    assert caught.value.code in ("calibration-fields", "calibration-unreadable")


def test_alpaca_is_text_in_its_own_prompts_where_no_template_writes_it():
    rows = [ALPACA, {**ALPACA, "input": "The sky."}]
    parsed = parse(json.dumps(rows).encode(), suffix=".json", where="own.json", chat=None)
    assert isinstance(parsed, Texts)
    assert parsed.alpaca
    without, context = parsed.documents
    assert without.startswith("Below is an instruction that describes a task. Write a response")
    assert without.endswith("\n\n### Instruction:\nWhy?\n\n### Response:\nBecause.")
    assert "a task, paired with an input" in context
    assert "### Instruction:\nWhy?\n\n### Input:\nThe sky.\n\n### Response:" in context


@pytest.mark.parametrize("suffix", [".csv", ".json"])
def test_a_column_that_cannot_be_read_is_told_with_those_that_can(suffix):
    table = {".csv": b"review,stars\nGood.,5\nBad.,\n", ".json": b'[{"review": "Good.", "stars": 5}]'}[suffix]
    wrong = {
        "stars": ("the column 'stars' holds numbers", f"write mine{suffix}:review"),
        "revew": ("no column 'revew'", f"columns: review, stars; write mine{suffix}:review"),
    }
    for column, (value, remedy) in wrong.items():
        with pytest.raises(InputError) as caught:
            parse(table, suffix=suffix, where=f"mine{suffix}:{column}", column=column)
        assert caught.value.code == "calibration-fields"
        assert value in str(caught.value)
        assert remedy in str(caught.value)


def test_a_folder_of_texts_is_told_what_is_read(tmp_path):
    for name in ("a.txt", "b.txt"):
        (tmp_path / name).write_text("Words.")
    with pytest.raises(InputError) as caught:
        read(str(tmp_path), "calib", chat=False)
    assert caught.value.code == "calibration-folder"
    assert f"give one file: {tmp_path}/a.txt, {tmp_path}/b.txt; or join them: cat {tmp_path}/*.txt" in str(caught.value)
