"""A bounded number of orgs has series of its own, those of the policy file first."""

from services.gateway.org_labels import OTHER, OrgLabels


def test_the_first_that_come_have_labels_and_all_others_share_one() -> None:
    labels = OrgLabels(2)
    assert [labels.of(org) for org in ("a", "b", "c", "a", "d")] == ["a", "b", OTHER, "a", OTHER]


def test_room_is_kept_for_those_that_the_policy_file_names() -> None:
    labels = OrgLabels(3, lambda: ("x", "y"))
    assert [labels.of(org) for org in ("a", "b", "y", "x", "b")] == ["a", OTHER, "y", "x", OTHER]


def test_no_change_of_the_file_makes_more_than_the_bound() -> None:
    named = ["x"]
    labels = OrgLabels(2, lambda: named)
    assert labels.of("x") == "x"
    named[:] = [f"n{number}" for number in range(9)]
    assert [labels.of(org) for org in named] == ["n0", *[OTHER] * 8]
    assert labels.of("x") == "x", "what has a label keeps it"


def test_without_room_all_are_others() -> None:
    assert OrgLabels(0, lambda: ("x",)).of("x") == OTHER
