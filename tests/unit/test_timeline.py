from handoff.timeline import KEPT, Timeline


def test_timelines_are_kept_of_the_last_handoffs() -> None:
    timeline = Timeline()
    for number in range(KEPT + 5):
        timeline.mark((f"h{number}", 1), "landed", float(number))
    kept = timeline.all()
    assert (len(kept), kept[0]["handoff_id"], kept[-1]["landed"]) == (KEPT, "h5", KEPT + 4.0)
