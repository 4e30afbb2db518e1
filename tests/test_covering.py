"""Few tests that launch all kernels."""

from covering import covering


def ran(test, kernels, seconds=0.0, passed=True):
    return {"test": test, "seconds": seconds, "passed": passed, "kernels": kernels}


def test_all_kernels_of_tests_that_passed():
    launched = [ran("most", ["a", "b", "c"], 1), ran("part of it", ["a", "c"]), ran("another", ["c", "d"]),
                ran("failed", ["a", "e"], passed=False), ran("none", [])]
    chosen = covering(launched)
    assert {"another"} <= set(chosen) <= {"most", "part of it", "another"}
    kernels = {one["test"]: one["kernels"] for one in launched}
    assert {kernel for test in chosen for kernel in kernels[test]} == set("abcd")


def test_the_quicker_of_two_alike():
    assert covering([ran("slow", ["a"], 9), ran("quick", ["a"], 1)]) == ["quick"]
