"""The simulation of many servers: where they listen, how long answers take, and what other ranks would say."""

from __future__ import annotations

import statistics

from bench.scale import POINTS, CollectiveTraffic, EchoRanks, Point, machines_of, measured, seconds_of


def test_servers_of_a_group_have_one_address_and_gpus_of_their_own() -> None:
    """`of_one_machine` wants this of servers that share a group; with `group=1` it must refuse them."""
    machines = machines_of(Point(servers=512, ranks=64))
    assert [len(machine) for machine in machines] == [8] * 64
    for machine in machines:
        assert len({place.host for place in machine}) == 1
        assert len({place.gpu for place in machine}) == 8
    assert len({place.host for machine in machines for place in machine}) == 64
    everywhere = [place for machine in machines_of(Point(servers=512, ranks=64, group=0)) for place in machine]
    assert (len({place.host for place in everywhere}), len({place.gpu for place in everywhere})) == (1, 512)
    alone = [place for machine in machines_of(Point(servers=64, ranks=8, group=1)) for place in machine]
    assert {place.gpu for place in alone} == {"shared"}


def test_no_two_servers_listen_at_one_place() -> None:
    for point in POINTS:
        entries = [place.entry["base_url"] for machine in machines_of(point) for place in machine]
        assert len(set(entries)) == point.servers


def test_answers_take_what_the_committed_run_measured() -> None:
    """A seed's answer takes as long whenever it is asked; most are within the measured ones, a few are stragglers."""
    seconds = [seconds_of(seed) for seed in range(2000)]
    assert seconds == [seconds_of(seed) for seed in range(2000)]
    assert abs(statistics.median(seconds) - statistics.median(measured().calls_s)) < 0.1
    assert 5 <= sum(one > measured().calls_s[-1] for one in seconds) <= 50


def test_other_ranks_say_what_rank_0_says() -> None:
    told = CollectiveTraffic()
    ranks = EchoRanks(rank=0, world_size=3, told=told)
    assert ranks.all_gather_object({"lost": 1}) == [{"lost": 1}] * 3
    assert ranks.broadcast_object("weights") == "weights"
    assert ranks.all_succeed(lambda: 5) == [5, 5, 5]
    assert (told.number, told.num_bytes > 0) == (3, True)
