"""The playground without a browser: what a session notes, what is drawn of it, the worker, and the panel pressed by a
program."""
import time
from dataclasses import replace
from html.parser import HTMLParser
from itertools import pairwise
from xml.etree import ElementTree

import pytest
import torch

from helpers import tiny
from helpers_text import TOKENIZER, talker
from specdec.app.registry import PairSpec
from specdec.drafters.adaptive import MOST, adaptive
from specdec.drafters.base import NoDrafter
from specdec.drafters.choose import COST, HybridDrafter
from specdec.drafters.clock import Clock, Watch
from specdec.drafters.costs import with_watch
from specdec.drafters.lookup import NGramDrafter
from specdec.drafters.model import ModelDrafter
from specdec.errors import InputError, ModelError
from specdec.loop import speculate
from specdec.pair import Pair
from specdec.panel import playground
from specdec.panel.palette import LOOKS
from specdec.panel.playground import (
    K_MAX,
    PLAIN,
    Engine,
    PanelSettings,
    Playground,
    Position,
    Recipe,
    RecordingRandom,
    Session,
    ShownToken,
    Worker,
    acceptance_html,
    bar_html,
    chooser_html,
    drafter_menu,
    explain,
    look_at,
    measures,
    measures_html,
    microscope_html,
    plain_steps,
    position_html,
    promised,
    promised_for,
    rounds_html,
    speedup_svg,
    style_html,
    text_html,
    token_html,
    typical_seconds,
    visible,
)
from specdec.result import Round
from specdec.sampling import SamplingParams, SeededRandom
from specdec.speedup import tokens_per_round, walltime_factor
from specdec.verify import greedy_match, speculative_sampling

PROMPT = [1, 2, 3, 1, 2]
RULES = greedy_match, speculative_sampling
EVIL = '<img src=x onerror="alert(1)"> & \' </span>\n'


def drafters(target):
    return {
        "n-gram": NGramDrafter(), "itself": ModelDrafter(target, target.vocab_size),
        "noisy": ModelDrafter(tiny(target.vocab_size, noise=0.05), target.vocab_size), "none": NoDrafter(),
    }


def begun(kind="noisy", settings=PanelSettings(K=4, temperature=.8), target=None, count=24, **more) -> Session:
    target = target or tiny()
    return Session(target, drafters(target)[kind], TOKENIZER, PROMPT, settings, max_new_tokens=count, **more)


def written(*args, **more) -> Session:
    session = begun(*args, **more)
    while session.step(): pass
    return session


def contradictions(session: Session) -> list:
    "Positions whose status doesn't follow from the numbers that were noted there."
    places = [place for places in session.positions for place in places if place.u_accept is not None]
    return [place for place in places if (place.status == "accepted") != (place.u_accept < place.chance)]


# The session

@pytest.mark.parametrize("kind", ["n-gram", "itself", "noisy", "none"])
@pytest.mark.parametrize("temperature, top_p", [(0, 1), (.8, 1), (1.5, .7)])
def test_watched_loop_says_what_the_unwatched_one_says(kind, temperature, top_p):
    target = tiny()
    session = written(kind, PanelSettings(3, temperature, top_p), target, seed=5)
    sampling = SamplingParams(temperature, top_p=None if top_p == 1 else top_p)
    assert session.rounds == list(speculate(target, drafters(target)[kind], PROMPT, sampling, SeededRandom(5), 3, 24,
                                            verify=RULES[temperature > 0]))
    assert len(session.rounds) == len(session.positions) == len(session.seconds) == len(session.draft_seconds)
    assert session.finished and not session.step()


@pytest.mark.parametrize("kind", ["n-gram", "noisy"])
def test_statuses_follow_from_the_noted_numbers(kind):
    session = written(kind, count=40)
    statuses = [place.status for places in session.positions for place in places]
    assert {"accepted", "rejected"} <= set(statuses) and contradictions(session) == []
    for done, places in zip(session.rounds, session.positions):
        assert [place.drafted for place in places if place.drafted is not None] == done.drafted[:len(places)]
        assert sum(place.status == "accepted" for place in places) == done.accepted
        drawn = [place.next_token for place in places if place.next_token is not None]
        assert drawn == [done.emitted[-1]]


def test_statuses_that_do_not_follow_are_noticed():
    session = written("noisy", count=40)
    for i, places in enumerate(session.positions):
        session.positions[i] = [
            Position(**{**vars(place), "u_accept": None if place.u_accept is None else 1 - place.u_accept})
            for place in places
        ]
    assert contradictions(session)


@pytest.mark.parametrize("temperature, rule", [(0, greedy_match), (.8, speculative_sampling)])
def test_what_is_explained_is_the_rule_that_runs(temperature, rule, monkeypatch):
    "The session asks one of the package's rules, and reports what that answered."
    asked = []
    def noted(*given):
        asked.append(rule(*given))
        return asked[-1]
    monkeypatch.setattr(playground, rule.__name__, noted)
    session = written("noisy", PanelSettings(3, temperature))
    assert asked == [(r.accepted, r.emitted[-1]) for r in session.rounds[1:]] and asked


def test_greedy_draws_nothing_to_show():
    session = written("noisy", PanelSettings(K=3))
    assert all(place.u_accept is None and place.u_draw is None for places in session.positions for place in places)
    assert {len(p.ids) for places in session.positions for p in places} == {8}


def test_settings_count_from_the_next_round_on():
    session = begun("itself", PanelSettings(1, .8), count=40)
    for K, steps in ((1, 3), (5, 1), (2, 2)):
        session.settings = PanelSettings(K, .8)
        for _ in range(steps): session.step()
    assert [len(r.drafted) for r in session.rounds] == [0, 1, 1, 5, 2, 2]
    assert session.since == 4 and len(session.recent) == 2
    session.settings = PanelSettings(2, 0.0)
    session.step()
    assert session.positions[-1][0].u_accept is None and session.since == 6


def test_text_that_ends_inside_a_draft_has_no_places_after_its_end():
    target = tiny()
    free = written("itself", PanelSettings(6, 0), target)
    end = free.ids[4]
    session = written("itself", PanelSettings(6, 0), target, eos_ids=frozenset([end]))
    assert session.ids[-1] == end and len(session.positions[-1]) <= len(session.rounds[-1].emitted)
    assert [token.id for token in session.tokens] == session.ids


@pytest.mark.parametrize("kind", ["n-gram", "itself", "noisy", "none"])
@pytest.mark.parametrize("temperature", [0, .8])
def test_adaptive_rounds_are_those_of_the_unwatched_loop(kind, temperature):
    target = tiny()
    session = written(kind, PanelSettings("adaptive", temperature), target, count=40, seed=5)
    drafter = adaptive(drafters(target)[kind])
    sampling = SamplingParams(temperature)
    assert session.rounds == list(speculate(target, drafter, PROMPT, sampling, SeededRandom(5), MOST, 40,
                                            verify=RULES[temperature > 0]))
    assert contradictions(session) == [] and K_MAX == MOST


def test_where_a_chooser_decides_a_line_says_what_it_goes_by():
    target = tiny()
    assert chooser_html(None) == chooser_html(begun()) == chooser_html(written("itself", PanelSettings(3, .8))) == ""
    session = written("itself", PanelSettings("adaptive", .8), target, count=40)
    K, c = [len(r.drafted) for r in session.rounds if r.drafted][-1], session.drafter.chooser.c[0]
    v = session.drafter.chooser.prices(0, K)[-1] - K * c
    assert f"The chooser goes by v({K}) = {v:.2f}, c = {c:.3f} plain steps (assumed" in chooser_html(session)
    session.settings = PanelSettings(2, .8)  # from the next round on, so these rounds are still the chooser's
    assert "chooser" in chooser_html(session)
    clock = Clock([0.0, .5])
    for rows in (1, 3): clock.read(1, rows, .01 * rows)
    clock.drafted(1, 2, .004)
    for frozen, whose in ((False, "as its clock has seen them"), (True, "frozen prices")):
        clock.frozen = frozen
        both = with_watch(HybridDrafter(NGramDrafter(), ModelDrafter(target, target.vocab_size)), Watch(clock))
        session = Session(target, both, TOKENIZER, PROMPT, PanelSettings(2, .8), max_new_tokens=30)
        while len(session.rounds) < 20 and session.step():
            if session.rounds[-1].drafted: K = len(session.rounds[-1].drafted)
        said, told = chooser_html(session), clock.told()
        assert f"v({K}) = {told['verify'][K - 1]:.2f}, c = {told['c'][0][0]:.3f}, {told['c'][1][0]:.3f}" in said
        assert whose in said and said.count("<p") == 1


def test_adaptive_may_begin_and_end_within_a_text():
    session = begun("itself", PanelSettings(1, .8), count=90)
    for K, steps in ((1, 2), ("adaptive", 2), (2, 2), ("adaptive", 1)):
        session.settings = PanelSettings(K, .8)
        for _ in range(steps): session.step()
    lengths = [len(r.drafted) for r in session.rounds]
    assert [lengths[i] for i in (0, 1, 4, 5)] == [0, 1, 2, 2]
    first, second, third = (lengths[i] for i in (2, 3, 6))
    assert 1 < first < second <= third  # it learns that every guess is right, and doesn't forget it meanwhile
    assert contradictions(session) == []


def test_settings_and_requests_that_cannot_be_served():
    for K in (0, K_MAX + 1, 1.5, True, "many"):
        with pytest.raises(InputError): PanelSettings(K)
    for wrong in (dict(temperature=float("nan")), dict(top_p=0.0)):
        with pytest.raises(InputError): PanelSettings(**wrong)
    with pytest.raises(InputError, match="context"): Session(tiny(), NoDrafter(), TOKENIZER, [1] * 100, PanelSettings())
    with pytest.raises(InputError, match="seed"):
        Session(tiny(), NoDrafter(), TOKENIZER, [1], PanelSettings(), seed=2**80)


def test_a_place_keeps_what_was_said_and_sums_over_everything():
    p, q = torch.rand(500).softmax(0), torch.rand(500).softmax(0)
    place = look_at(p, q, "rejected", drafted=7, next_token=9)
    assert len(place.ids) == 8 and {7, 9} <= set(place.ids)
    assert place.overlap == pytest.approx(torch.minimum(p, q).sum().item(), abs=1e-5)
    assert place.residual[place.ids.index(9)] == pytest.approx(
        ((p - q).clip(min=0) / (p - q).clip(min=0).sum())[9].item(), rel=1e-3, abs=1e-6
    )
    assert [a >= b for a, b in pairwise(place.p)] == [True] * 7
    same = look_at(p, p, "accepted", drafted=7)
    assert same.chance == 1 and same.residual == same.p  # no division by a residual of nothing


def test_recording_source_changes_nothing():
    a, b, weights = RecordingRandom(1), SeededRandom(1), torch.rand(9)
    assert [a.categorical(weights) for _ in range(20)] == [b.categorical(weights) for _ in range(20)]
    assert len(a.drawn) == 20 and a.bernoulli(.5) == b.bernoulli(.5) and len(a.drawn) == 21


# Text

def test_tokens_are_the_text_and_what_was_struck_out():
    session = Session(talker(), NGramDrafter(), TOKENIZER, PROMPT, PanelSettings(3, 1.5), max_new_tokens=60)
    while session.step(): pass
    assert [t.id for t in session.tokens if t.status != "rejected"] == session.ids
    said = [("corrected" if status == "corrected" else status, token)
            for r in session.rounds for token, status in r.statuses()]
    assert [(t.status, t.id) for t in session.tokens] == said
    assert {t.status for t in session.tokens} <= {*LOOKS, "target"}
    for t in session.tokens: assert session.positions[t.round][t.number - 1] is t.position


def test_a_character_of_several_tokens_stands_at_its_last():
    ids, session = TOKENIZER("🦊 fox")["input_ids"], begun()
    place = look_at(torch.ones(10) / 10, None, "target", next_token=1)
    for token in ids: session.read(replace(place, next_token=token), 1)
    texts = [t.text for t in session.tokens]
    assert "".join(texts).replace("▯", "") == "🦊 fox" and texts[0] == "▯"


class Tags(HTMLParser):
    "Tags and attributes of a page."
    def __init__(self, html):
        super().__init__()
        self.tags, self.names, self.text = set(), set(), ""
        self.feed(html)
    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.names |= {name for name, _ in attributes}
    def handle_data(self, data): self.text += data


def evil(status):
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1])
    return ShownToken(1, EVIL, status, 1, 1, look_at(p, q, status, 1, 0, u_accept=0.5, u_draw=0.2))


@pytest.mark.parametrize("status", ["target", "accepted", "rejected", "corrected", "bonus"])
def test_what_a_model_says_is_never_markup(status):
    page = Tags(text_html([evil(status)]))
    assert page.tags == {"div", {"rejected": "del", "corrected": "ins"}.get(status, "span")}
    assert page.names <= {
        "class", "role", "tabindex", "data-tip", "data-at", "aria-label", "data-lm-suppress-shortcuts", "onkeydown",
        "onclick",
    }
    assert page.text.replace("⏎", "").rstrip("\n") == EVIL.rstrip("\n")
    assert "\n" not in token_html(evil(status))
    assert Tags(f"<span>{EVIL}</span>").tags == {"span", "img"}  # what would happen without
    table = Tags(position_html(evil("rejected").position, lambda token: EVIL))
    assert "img" not in table.tags and table.names == {"class", "scope", "style", "aria-hidden"}


def test_explanations_hold_the_numbers():
    assert explain(evil("accepted")).endswith("p = 0.300 · q = 0.700 · u = 0.500 < min(1, p/q) = 0.429")
    assert "≥" in explain(evil("rejected"))
    assert "from the residual with u = 0.200" in explain(evil("corrected"))
    assert "from p with u" in explain(evil("bonus"))
    assert visible("") == "∅" and visible("a\tb") == "a⇥b"


def test_one_token_is_reached_by_the_tab_key():
    html = text_html([evil("accepted")] * 3)
    assert html.count('tabindex="0"') == 1 and html.count('tabindex="-1"') == 2
    assert "nothing yet" in text_html([], "nothing yet")


STEPS = [.02] * 8  # s, of plain decoding


def test_figures_count_the_same_stretch():
    session = written("noisy", count=40)
    found = measures(session, STEPS)
    assert found.rounds == len(session.rounds) - 1 and found.tokens == 39  # the prompt's token is in neither
    assert found.saved == 39 - found.rounds == sum(len(r.emitted) - 1 for r in session.recent)
    assert found.tau == pytest.approx(39 / found.rounds) and found.c > 0
    assert found.rate == pytest.approx(39 / typical_seconds(session.recent, session.seconds[1:]))
    assert found.speedup == pytest.approx(found.rate * .02)
    assert measures(session).speedup is None and measures(session).c == 0
    assert measures(written("none")).alpha is None and measures(written("none")).saved == 0


def test_counts_start_afresh_with_the_settings():
    session = begun("itself", PanelSettings(1, .8), count=40)
    for _ in range(4): session.step()
    session.settings = PanelSettings(5, .8)
    for _ in range(2): session.step()
    found = measures(session)
    assert (found.rounds, found.tokens) == (2, sum(len(r.emitted) for r in session.rounds[-2:]))


def test_tiles_begin_with_what_no_noise_changes():
    found = measures(written("noisy", count=40), STEPS)
    page = Tags(measures_html(found)).text
    assert page.startswith(f"forwards saved {found.saved} of {found.tokens}tokens")
    assert f"{found.tau:.2f}" in page and f"{found.speedup:.2f}×" in page and "–" in measures_html(None)


def test_times_are_medians_of_their_kind():
    short, long = Round([], 0, [1]), Round([1, 2], 2, [1, 2, 3])
    rounds, seconds = [short, long] * 5, [.1, .2] * 4 + [5.0, .2]
    assert typical_seconds(rounds, seconds) == pytest.approx(1.5)  # one of the short ones was held up
    assert typical_seconds([], []) == 0


@pytest.mark.parametrize("steps, busy", [
    pytest.param([.02] * 8, False, id="quiet"), pytest.param([.02] * 15 + [1.0], False, id="one hiccup"),
    pytest.param([.02, .05] * 8, True, id="busy"), pytest.param([.02, .05], False, id="too few to tell"),
])
def test_a_busy_machine_is_named(steps, busy):
    found = measures(written("noisy"), steps)
    assert found.busy == busy == ("Something else is using this machine" in measures_html(found))


# Figures

def test_bars_have_their_lengths_and_leave_out_what_is_nothing():
    assert bar_html([("accepted", .25), ("residual", -.1)], [.5]) == (
        '<div class="sp-bar" aria-hidden="true"><span class="sp-accepted" style="width:25.0%"></span>'
        '<i style="left:50.0%"></i></div>'
    )


def test_figures_say_what_they_show():
    rounds = [Round([1, 2, 3], 3, [1, 2, 3, 4]), Round([1, 2, 3], 1, [1, 9])]
    page = Tags(acceptance_html(rounds)).text
    assert "11.002" in page and "20.502" in page and "31.001" in page  # position, share, tries
    assert "3.00 on average over 2 rounds" in rounds_html(rounds) and "No round" in rounds_html([])
    assert "No draft" in acceptance_html([]) and rounds_html([Round([], 0, [1])] * 200).count("<span") == 40


def test_a_position_shows_what_is_shared_what_is_left_and_what_is_too_much():
    place = evil("rejected").position
    html = position_html(place, str)
    assert "sums to 0.600" in html and Tags(html).text.count("◂ draft") == 1
    widths = [f'<span class="sp-{name}" style="width:{100 * size / .7:.1f}%">' for name, size in [
        ("accepted", .2), ("residual", .3), ("accepted", .3), ("rejected", .4), ("accepted", .1), ("residual", .1)]]
    assert [html.index(width) for width in widths] == sorted(html.index(width) for width in widths)
    alone = position_html(look_at(torch.tensor([.5, .5]), None, "target", next_token=0), str)
    assert "Nothing was drafted" in alone and "sp-p" in alone and "q, the draft" not in alone


def test_the_microscope_says_how_it_was_decided():
    session = written("noisy", count=40)
    for n, positions in enumerate(session.positions):
        for i, at in enumerate(positions, start=1):
            html = microscope_html(session, n, i)
            assert (f"Round {n}" in html) and (at.u_accept is None or f"u = {at.u_accept:.3f}" in html)
            assert ("Never tried" in html) == (at.status == "untried")
            assert ("drawn from the residual" in html) == (at.status == "rejected")
    greedy = written("noisy", PanelSettings(K=3))
    assert "nothing is drawn" in microscope_html(greedy, 1, 1)


def test_theory_and_measurement_stand_at_the_K_that_was_run():
    found, v = measures(written("noisy", count=40), STEPS), [1 + k / 10 for k in range(K_MAX)]
    assert found.K == 4
    there, here = walltime_factor(found.alpha.alpha, 7, found.c, v[6]), promised_for(found, v)
    assert promised(found, v)["alpha"][6] == pytest.approx(there)
    drawn = speedup_svg(7, found, v)
    assert f"K = 4: ● theory {here:.2f}× ◆ measured {found.speedup:.2f}× K = 7: ○ theory {there:.2f}×" in drawn
    assert "○" not in speedup_svg(4, found, v) and "○" not in speedup_svg("adaptive", found, v)
    root = ElementTree.fromstring(drawn)
    numbers = [float(e.get(name)) for e in root.iter() for name in ("x", "y", "cx", "cy") if e.get(name)]
    assert root.get("aria-label") and all(-10 <= n <= 420 for n in numbers)


def test_theory_uses_the_lengths_that_were_drafted():
    found, v = measures(written("n-gram", PanelSettings(5, .8), count=60), STEPS), [1 + k / 10 for k in range(K_MAX)]
    assert 0 in found.lengths and max(found.lengths) > 1  # lookup often has nothing to say
    a = found.alpha.alpha
    tokens = sum(float(tokens_per_round(a, n)) if n else 1 for n in found.lengths)
    cost = sum(v[n - 1] + n * found.c if n else 1 for n in found.lengths)
    assert promised_for(found, v) == pytest.approx(tokens / cost)
    assert promised_for(found, v) != pytest.approx(walltime_factor(a, 5, found.c, v[4]), rel=.01)


def test_an_adaptive_K_is_marked_at_its_median():
    session = written("itself", PanelSettings("adaptive", .8), count=40)
    found = measures(session, STEPS)
    lengths = sorted(len(r.drafted) for r in session.recent if r.drafted)
    assert found.K == lengths[(len(lengths) - 1) // 2] > 1 and measures(written("none")).K == 0
    assert f"K = {found.K}: ●" in speedup_svg("adaptive", found, [1.0] * K_MAX)


def test_theory_says_nothing_before_its_costs_are_measured():
    session, v = written("noisy", count=40), [1.0] * K_MAX
    for drawn in (speedup_svg(7, measures(session), v), speedup_svg(7, measures(session, STEPS))):
        assert "not measured yet" in drawn and "×" not in drawn
    for nothing in (None, measures(written("none"))): assert "No draft" in speedup_svg(1, nothing, v)


# The worker

@pytest.fixture
def worker():
    errors, paints = [], []
    made = Worker(lambda: paints.append(time.monotonic()), errors.append, interval=0)
    made.errors, made.paints = errors, paints
    yield made
    made.close()
    assert not made.thread.is_alive()


def test_a_new_job_takes_the_place_of_the_old(worker):
    steps = []
    def job(name, n):
        for i in range(n):
            steps.append(name)
            time.sleep(.002)
            yield
    worker.do(job("a", 10**6))
    time.sleep(.05)
    worker.do(job("b", 3))
    assert worker.join(5) and steps[-3:] == ["b"] * 3 and 1 < steps.count("a") < 1000
    assert len(worker.paints) >= len(steps) and not worker.errors


def test_a_job_that_fails_is_reported_and_the_worker_lives(worker):
    def failing():
        yield
        raise ValueError("oops")
    worker.do(failing())
    assert worker.join(5) and [str(e) for e in worker.errors] == ["oops"]
    before = len(worker.paints)
    worker.ask()
    assert worker.join(5) and len(worker.paints) > before


def test_painting_that_fails_is_reported_once_and_the_worker_lives():
    faults, painted, errors = [ValueError("no paint")], [], []
    def paint(): painted.append(1) if not faults else (_ for _ in ()).throw(faults.pop())
    made = Worker(paint, lambda error: (errors.append(str(error)), made.ask()), interval=0)
    for _ in range(2):
        made.ask()
        assert made.join(5)
    assert errors == ["no paint"] and painted
    made.close()


def test_painting_is_throttled_and_what_was_asked_too_early_is_painted_later():
    seen, value = [], [0]
    made = Worker(lambda: seen.append((value[0], time.monotonic())), lambda error: None, interval=.05)
    for value[0] in range(1, 30):
        made.ask()
        time.sleep(.005)
    assert made.join(5) and seen[-1][0] == 29 and len(seen) < 12
    assert all(later - earlier >= .05 for (_, earlier), (_, later) in pairwise(seen))
    made.close()


# The panel

@pytest.fixture
def toys(monkeypatch):
    "A registry with two pairs of one target that is at hand, and one that would have to be downloaded."
    made = Pair(talker(vocab=len(TOKENIZER)), talker(vocab=len(TOKENIZER)))
    specs = {
        "toy": PairSpec("smollm2", note="a <toy>"), "other": PairSpec("smollm2", note="another"),
        "far": PairSpec("some/model-that-is-nowhere"),
    }
    monkeypatch.setattr(playground, "list_pairs", lambda: specs)
    def loaded(name, target=None): return made if target is None else Pair(target)
    monkeypatch.setattr(playground, "load_pair", loaded)
    return made


@pytest.fixture
def panel(toys):
    made = Playground()
    made.controls["prompt"].value, made.controls["max_new_tokens"].value = "Hi", 16
    assert made.worker.join(20)
    yield made
    made.worker.close()


def word(panel, view): return Tags(panel.views[view].value).text


def test_panel_writes_and_measures(panel):
    assert word(panel, "status") == "Ready." and "a <toy>" in word(panel, "note")
    panel.controls["run"].click()
    assert panel.worker.join(20)
    session = panel.engine.session
    assert len(session.ids) == 16 and word(panel, "status") == "As many tokens as were asked for."
    assert panel.views["text"].value.count("sp-token") >= 16 and panel.engine.summary().speedup > 0
    assert len(panel.engine.costs["toy"]) == K_MAX and "speed-up" in word(panel, "tiles")
    assert not panel.controls["run"].disabled and panel.controls["stop"].disabled
    panel.controls["run"].click()  # finished: the same text again
    assert (
        panel.worker.join(20) and panel.engine.session is not session and panel.engine.session.rounds == session.rounds
    )


def test_steps_make_the_same_text_as_a_run(panel):
    for _ in range(3):
        panel.controls["step"].click()
        assert panel.worker.join(20)
    session = panel.engine.session
    assert len(session.rounds) == 3 and word(panel, "status") == "One round done."
    panel.controls["run"].click()
    assert panel.worker.join(20) and panel.engine.session is session
    ids = session.ids
    panel.controls["reset"].click()
    assert panel.worker.join(20) and panel.engine.session is None and "Press Run" in word(panel, "text")
    panel.controls["run"].click()
    assert panel.worker.join(20) and panel.engine.session.ids == ids


def test_stop_between_two_rounds(panel, toys, monkeypatch):
    forward = type(toys.target).forward
    monkeypatch.setattr(type(toys.target), "forward", lambda *a, **k: time.sleep(.02) or forward(*a, **k))
    panel.controls["max_new_tokens"].value = 80
    panel.controls["run"].click()
    while not panel.engine.session or len(panel.engine.session.rounds) < 3: time.sleep(.005)
    panel.controls["stop"].click()
    assert panel.worker.join(5)
    stopped = len(panel.engine.session.rounds)
    assert (
        "Run goes on from here" in word(panel, "status")
        and not panel.engine.session.finished
        and panel.controls["stop"].disabled
    )
    time.sleep(.1)
    assert len(panel.engine.session.rounds) == stopped


def test_a_finished_text_does_not_go_on(panel):
    panel.controls["run"].click()
    assert panel.worker.join(20) and panel.engine.session.finished
    panel.worker.do(panel.halt())
    assert panel.worker.join(5) and word(panel, "status") == "Stopped."


def test_sliders_move_the_figures_at_once_and_the_text_from_the_next_round(panel):
    panel.controls["step"].click()
    panel.controls["step"].click()
    panel.controls["run"].click()
    assert panel.worker.join(20)
    before = panel.views["speedup"].value, panel.views["text"].value
    panel.controls["K"].value = 9
    assert panel.worker.join(5)
    assert panel.views["text"].value == before[1]
    assert panel.engine.summary().alpha and panel.views["speedup"].value != before[0]
    assert panel.engine.session.settings.K == 9


def test_errors_are_shown_in_the_panel(panel, toys, monkeypatch):
    assert (panel.controls["K"].min, panel.controls["K"].max) == (1, K_MAX)  # it offers what is served
    panel.controls["prompt"].value = " \n"
    panel.controls["step"].click()
    assert "prompt is empty" in word(panel, "error")
    panel.controls["prompt"].value = "Hi " * 500
    panel.controls["step"].click()
    assert panel.worker.join(5) and "context" in word(panel, "error") and "error" in word(panel, "status")
    panel.controls["prompt"].value = "Hi"
    panel.controls["all_pairs"].value = True
    panel.controls["drafter"].value = "far"
    panel.controls["step"].click()
    assert panel.worker.join(5) and "some/model-that-is-nowhere" in word(panel, "error")
    panel.controls["drafter"].value = "toy"
    def broken(*a, **k): raise IndexError("<oops>")
    monkeypatch.setattr(type(toys.target), "forward", broken)
    panel.controls["step"].click()
    assert (
        panel.worker.join(5)
        and "IndexError: <oops>. This is a bug" in word(panel, "error")
        and 'role="alert"' in panel.views["error"].value
    )


def test_temperature_and_top_p_show_what_they_do_before_a_run(panel, toys):
    "On the first token's distribution: the target's own at these settings, and no text is begun."
    ids = panel.engine.encoded("Hi")
    logits = toys.target.forward(torch.tensor([ids]))[0, -1:]
    seen = set()
    for temperature, top_p in [(.2, 1), (2, 1), (.2, .3)]:
        panel.controls["temperature"].value, panel.controls["top_p"].value = temperature, top_p
        assert panel.worker.join(5)
        p = PanelSettings(5, temperature, top_p).sampling.probs(logits)[0]
        wanted = position_html(look_at(p, None, "target"), lambda token: toys.tokenizer.decode([token]))
        assert wanted in panel.views["position"].value and "Before a run" in word(panel, "position")
        seen.add(wanted)
    assert len(seen) == 3 and panel.engine.session is None
    panel.controls["run"].click()
    assert panel.worker.join(20) and "Before a run" not in word(panel, "position")


def test_microscope_follows_until_it_is_moved(panel):
    c = panel.controls
    for _ in range(4):
        c["step"].click()
        assert panel.worker.join(20)
    assert c["round"].value == 3 and "Round 3" in word(panel, "position")
    c["round"].value = 1
    assert panel.worker.join(5) and "Round 1" in word(panel, "position") and not panel.following
    c["round"].value = c["round"].max
    assert panel.worker.join(5) and panel.following
    c["place"].value = 1
    assert panel.worker.join(5) and "position 1" in word(panel, "position")


def test_the_box_below_the_slider_leaves_K_to_a_controller(panel, toys):
    c = panel.controls
    c["K"].value, c["adaptive"].value = 1, True
    assert c["K"].disabled and word(panel, "error") == ""  # the slider doesn't count
    c["run"].click()
    assert panel.worker.join(20)
    session = panel.engine.session
    asked = dict(temperature=.7, seed=0, max_new_tokens=16, verify=speculative_sampling)  # place by place
    same = Pair(toys.target, HybridDrafter(toys.drafter, c=(COST,)))  # the panel's controller goes by constants
    assert session.rounds[1:] == same.generate(session.prompt, K="adaptive", **asked).rounds
    assert f"K = {panel.engine.summary().K}: ●" in word(panel, "speedup") and word(panel, "old") == ""
    c["K"].value, c["adaptive"].value = 3, False
    assert panel.worker.join(5) and not c["K"].disabled
    assert session.settings.K == 3 and "K = adaptive" in word(panel, "made") and "changed K" in word(panel, "old")


@pytest.mark.parametrize("adapts", [False, True], ids=["with the slider", "with the box"])
def test_plain_decoding_drafts_nothing(panel, adapts):
    panel.controls["drafter"].value, panel.controls["K"].value = PLAIN, 1
    panel.controls["adaptive"].value = adapts
    panel.controls["run"].click()
    assert panel.worker.join(20) and word(panel, "error") == ""
    assert all(not r.drafted for r in panel.engine.session.rounds) and "alone" in word(panel, "note")
    found = panel.engine.summary()  # not compared with itself
    assert found.speedup is None and found.rate > 0 and "speed-up –" in word(panel, "tiles") and not panel.engine.plain
    assert word(panel, "made").startswith("Made by plain decoding, temperature 0.7, seed 0, for “Hi”")
    panel.controls["adaptive"].value, panel.controls["K"].value = False, 7
    assert panel.worker.join(5) and word(panel, "old") == ""  # K means nothing here


def test_menu_and_examples(panel):
    here = [("toy", "toy"), ("other", "other"), (PLAIN, PLAIN)]
    assert drafter_menu() == here
    assert drafter_menu(all_pairs=True) == [*here[:2], ("far (not on this machine)", "far"), here[2]]
    menu = panel.controls["drafter"]
    menu.value = "other"
    for wanted in (True, False):  # what is chosen stays, as long as it is offered
        panel.controls["all_pairs"].value = wanted
        assert menu.options == tuple(drafter_menu(wanted)) and menu.value == "other"
    panel.controls["all_pairs"].value = True
    menu.value = "far"
    panel.controls["all_pairs"].value = False
    assert menu.value == "toy"
    example = panel.controls["example"]
    example.value = example.options[2][1]
    assert panel.controls["prompt"].value == example.options[2][1]


def test_measurements_stop_where_the_context_ends():
    target = talker()
    assert len(list(plain_steps(target, [1] * 90, SamplingParams()))) < 10


def test_plain_steps_are_taken_between_the_rounds(panel, monkeypatch):
    order, beside, step = [], Engine.beside, Session.step
    monkeypatch.setattr(Engine, "beside", lambda self: order.append("plain") or beside(self))
    monkeypatch.setattr(Session, "step", lambda self: order.append("round") or step(self))
    panel.controls["max_new_tokens"].value = 40
    panel.controls["run"].click()
    assert panel.worker.join(20)
    rounds = len(panel.engine.session.rounds)
    assert order[:7] == ["round", "round", "plain", "round", "plain", "round", "plain"]
    assert order.count("plain") >= rounds - 1
    panel.controls["step"].click()
    assert panel.worker.join(20) and panel.engine.summary() is not None


def test_engine_keeps_pairs_and_forgets_sessions(toys):
    engine = Engine()
    engine.load(PLAIN)
    assert engine.pair is toys
    engine.open(Recipe("toy", "Hi", 0, 8), PanelSettings())
    engine.close()
    assert engine.session is None and engine.summary() is None and engine.pairs


def test_a_pair_that_chooses_goes_by_frozen_prices(toys):
    toys.drafter = HybridDrafter(NGramDrafter(), ModelDrafter(toys.target, toys.target.vocab_size))
    engine = Engine()
    engine.load("toy")
    session = engine.open(Recipe("toy", "Hi", 0, 30), PanelSettings())
    while session.step(): pass
    assert session.rounds and "plain steps (frozen prices)" in chooser_html(session)


def test_another_drafter_keeps_the_target_and_the_figures_are_marked_as_old(panel, toys):
    panel.controls["run"].click()
    assert panel.worker.join(20) and word(panel, "old") == ""
    tiles = panel.views["tiles"].value
    panel.controls["drafter"].value = "other"
    assert panel.worker.join(5)
    assert "by toy" in word(panel, "made")
    assert "changed the drafter. Run writes a new text by other" in word(panel, "old")
    assert "sp-old" in panel.root._dom_classes and panel.views["tiles"].value == tiles
    panel.controls["run"].click()
    assert panel.worker.join(20)
    assert word(panel, "old") == "" and "sp-old" not in panel.root._dom_classes
    assert panel.engine.pair is not toys and panel.engine.pair.target is toys.target
    assert len(panel.engine.targets) == 1


def test_a_result_says_what_it_was_made_with(panel):
    panel.controls["run"].click()
    assert panel.worker.join(20) and word(panel, "old") == ""
    before = [panel.views[name].value for name in ("tiles", "text", "made")]
    assert word(panel, "made") == "Made by toy, K = 5, temperature 0.7, seed 0, for “Hi”."
    for name, value, words in [("temperature", 1.5, "the temperature"), ("K", 3, "K"), ("top_p", .9, "top-p"),
                               ("prompt", "Hello", "the prompt"), ("seed", 1, "the seed"),
                               ("max_new_tokens", 24, "the number of tokens")]:
        kept = panel.controls[name].value
        panel.controls[name].value = value
        assert panel.worker.join(5)
        assert word(panel, "old") == f"Old: since then you changed {words}. Run writes a new text by toy."
        assert "sp-old" in panel.root._dom_classes
        assert [panel.views[name].value for name in ("tiles", "text", "made")] == before  # still those of its settings
        panel.controls[name].value = kept
        assert panel.worker.join(5) and word(panel, "old") == "" and "sp-old" not in panel.root._dom_classes
    panel.controls["K"].value, panel.controls["prompt"].value = 3, "<b>Hello</b> " + "there " * 30
    assert panel.worker.join(5) and "changed the prompt and K." in word(panel, "old")
    panel.controls["run"].click()
    assert panel.worker.join(20)
    assert "K = 3" in word(panel, "made") and "“<b>Hello</b> there" in word(panel, "made")
    assert len(word(panel, "made")) < 150 and "<b>" not in panel.views["made"].value


def test_a_text_that_goes_on_says_with_what(panel):
    for _ in range(2):
        panel.controls["step"].click()
        assert panel.worker.join(20)
    panel.controls["K"].value = 2
    assert panel.worker.join(5) and "goes on with K = 2, temperature 0.7" in word(panel, "old")
    assert "other settings" not in word(panel, "made")
    panel.controls["step"].click()
    assert panel.worker.join(20) and word(panel, "old") == ""
    assert "K = 2" in word(panel, "made")
    assert "figures count from round 2 on; before, other settings" in word(panel, "made")


def test_the_final_text_leaves_out_what_was_struck_out(panel):
    panel.engine.session = written("noisy", count=40)
    panel.changed()
    assert panel.worker.join(5)
    rejected = sum(t.status == "rejected" for t in panel.engine.session.tokens)
    assert panel.views["text"].value.count("<del") == rejected > 0
    panel.controls["final"].value = True
    assert panel.worker.join(5) and "<del" not in panel.views["text"].value and "<ins" in panel.views["text"].value


def test_a_click_puts_a_token_under_the_microscope(panel):
    panel.controls["run"].click()
    assert panel.worker.join(20)
    token = panel.engine.session.tokens[2]
    assert f'data-at="{token.round},{token.number}"' in panel.views["text"].value
    panel.controls["picked"].value = f"{token.round},{token.number}"  # as click.js does
    assert panel.worker.join(5) and f"Round {token.round}: " in word(panel, "position")
    assert panel.controls["place"].value == token.number and not panel.following


# Where it is shown

def test_what_is_missing_is_named_with_the_command(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "ipywidgets", None)
    with pytest.raises(ModelError, match="pip install ipywidgets"): Playground()


def test_files_of_the_page():
    page = Tags(style_html())
    assert page.tags == {"style"} and page.names == {"onload"}
    assert "onload" not in style_html(names=False) and "prefers-color-scheme" not in style_html()
