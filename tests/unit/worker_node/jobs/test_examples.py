"""An answer that repeats its prompt's example is told from one about the text."""

import pytest

from worker_node.bounded.jobs import JOBS, MEMORY, NOTIFICATION, repeats

TEXT = "Disk /dev/sda1 is 97 % full on host web-3. Ben wants weekly reports."


def memory(*candidates, notes=""):
    return {"candidates": list(candidates), "notes": notes}


@pytest.mark.parametrize(
    "answer",
    [
        MEMORY,
        memory("velmira likes tea."),
        memory("Ben prefers juniper tea to coffee"),
        memory("Ben wants weekly reports.", notes="One preference of Velmira was stated."),
    ],
)
def test_a_copy_is_found_whole_in_part_and_reworded(answer):
    assert repeats(answer, MEMORY, TEXT)


def test_a_copied_notification_is_found():
    assert repeats(NOTIFICATION, NOTIFICATION, TEXT)
    assert repeats(NOTIFICATION | {"summary": "The backup disk is 91 % full"}, NOTIFICATION, TEXT)


def test_an_answer_about_the_text_is_none():
    assert not repeats(memory("Ben wants weekly reports.", notes="One preference was stated."), MEMORY, TEXT)
    own = {"severity": "warning", "category": "storage", "summary": "The disk is 97 % full.", "action_needed": True}
    assert not repeats(own, NOTIFICATION, TEXT)


def test_what_the_text_says_itself_is_no_copy():
    assert not repeats(MEMORY, MEMORY, "Velmira prefers juniper tea to coffee. One preference of Velmira was stated.")


@pytest.mark.parametrize("job", [job for job in JOBS.values() if job.example is not None], ids=lambda job: job.name)
def test_the_example_is_valid_for_its_job_and_only_in_the_first_prompt(job):
    shown, bare = (job.messages("text", with_example=flag)[-1].content for flag in (True, False))
    assert "Example: {" in shown
    assert "Example" not in bare
    assert list(job.example) == job.schema(job.default_max_new_tokens)["required"]
