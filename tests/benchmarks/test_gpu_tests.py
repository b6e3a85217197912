from benchmarks.gpu_tests import count_outcomes

REPORT = """<testsuites><testsuite>
<testcase classname="tests.moe.test_a" name="one" time="1.5" />
<testcase classname="tests.moe.test_a" name="two[x]" time="2.25"><failure /></testcase>
<testcase classname="tests.moe.test_a" name="three" time="0"><error /></testcase>
<testcase classname="tests.moe.test_b" name="four" time="0.1"><skipped /></testcase>
<testcase time="0.0" />
</testsuite></testsuites>"""


def test_each_file_has_a_row() -> None:
    first, second = count_outcomes(REPORT)
    assert first == {
        "file": "tests/moe/test_a.py",
        "op": "tests",
        **dict(passed=1, failed=2, skipped=0, failures=["two[x]", "three"], seconds=3.8),
    }
    assert second["file"] == "tests/moe/test_b.py" and second["skipped"] == 1
