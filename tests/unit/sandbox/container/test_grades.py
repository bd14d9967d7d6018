"""Grades of containers: their order, and what the operator is told."""

from __future__ import annotations

import pytest

from fumehood.core.limits import Grade, strongest, weakest
from fumehood.sandbox.container.container import GradeTooLow
from fumehood.sandbox.container.spec import grade_of


@pytest.mark.parametrize("least", Grade)
def test_grade_is_at_least_itself_and_each_weaker_one(least: Grade) -> None:
    grades = list(Grade)
    accepted = [grade for grade in grades if grade.is_at_least(least)]
    assert accepted == grades[: grades.index(least) + 1]


@pytest.mark.parametrize(
    ("runtime", "grade"),
    [(None, "namespaces"), ("runc", "namespaces"), ("runsc", "kernel"), ("runsc-kvm", "kernel")],
)
def test_runtime_with_a_kernel_of_its_own_has_the_strongest_grade(
    runtime: str | None, grade: str
) -> None:
    assert grade_of(runtime) == grade


@pytest.mark.parametrize(
    ("least", "way"), [(Grade.KERNEL, "Use gVisor"), (Grade.NAMESPACES, "as root")]
)
def test_refusal_names_what_could_be_had_and_is_final(least: Grade, way: str) -> None:
    refusal = GradeTooLow(Grade.WATCHED, least)
    assert refusal.heals is False
    assert way in refusal.remedy
    assert 'container.least_grade to "watched"' in refusal.remedy
    assert refusal.details == {"grade": "watched", "least_grade": least, "cure": refusal.remedy}


def test_strongest_and_weakest_grade_of_several() -> None:
    assert strongest(None, Grade.WATCHED, Grade.NAMESPACES) is Grade.NAMESPACES
    assert strongest(None, None) is None
    assert weakest([Grade.KERNEL, Grade.WATCHED, Grade.NAMESPACES]) is Grade.WATCHED
    assert weakest([Grade.KERNEL, None]) is None
    assert weakest([]) is None
