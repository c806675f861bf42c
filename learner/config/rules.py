"""What must be true between the keys of a configuration, whatever the number of ranks.

A rule takes a `RunConfig`, or a view of one that is partly wrong, and yields one `Mistake` per thing that is wrong.
`RULES` is all of them, in the order of the file's sections; the first line of each goes to CONFIG.md. Rules that need
the number of ranks are in `plan.py`.

The first part makes the two ways to name rollout servers one (R05): `servers`, or `base_url` paired with `group_port`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

from learner.config.schema import (
    BestOfConfig,
    GrpoConfig,
    LossConfig,
    RunConfig,
    ServerClientConfig,
    ServerEntry,
    TaskConfig,
)
from shared.config.model import Mistake, Section, show
from shared.wire import TOKEN_VARIABLE

SERVER = "custom.extra.rollout_matching.vllm.server"
WAY_OUT = (
    "or switch to custom.extra.rollout_matching.vllm.mode: colocate "
    "or custom.extra.rollout_matching.rollout_backend: hf"
)
MAX_PORT = 65535


def paired_servers(server: ServerClientConfig) -> list[ServerEntry]:
    """The servers of either form, for a section without mistakes. A single port rises by one per URL. URLs lose their
    trailing slashes."""
    if server.servers is not None:
        pairs = [(entry.base_url, entry.group_port) for entry in server.servers]
    else:
        urls, ports = _paired_lists(server)
        pairs = list(zip(urls, ports, strict=True))
    return [ServerEntry(base_url=url.rstrip("/"), group_port=port) for url, port in pairs]


def entry_mistakes(base_url: str, group_port: int | None) -> list[Mistake]:
    """What is wrong with one server that is named outside of a configuration."""
    found = _url_mistake(base_url, "URL")
    mistakes = [found] if found else []
    if group_port is not None and not 1 <= group_port <= MAX_PORT:
        wanted = f"a port from 1 to {MAX_PORT}"
        remedy = str(ServerEntry.model_fields["group_port"].description)
        mistakes.append(Mistake(path="--group-port", found=show(group_port), wanted=wanted, remedy=remedy))
    return mistakes


def server_mistakes(server: ServerClientConfig) -> Iterator[Mistake]:
    """What is wrong with a section in use: none, both or half a form, wrong pairing, bad URLs, ports that clash (R05,
    R16)."""
    yield from _discovery_mistakes(server)
    form = list(_form_mistakes(server))
    yield from form
    if form:
        return
    if server.servers is not None:
        places = [f"{SERVER}.servers[{i}]" for i in range(len(server.servers))]
        urls, ports = [entry.base_url for entry in server.servers], [entry.group_port for entry in server.servers]
        url_at = [f"{place}.base_url" for place in places]
        port_at = [f"{place}.group_port" for place in places]
    else:
        urls, ports = _paired_lists(server)
        url_at = _places(f"{SERVER}.base_url", server.base_url)
        one_port = isinstance(server.group_port, int)
        port_at = (
            [f"{SERVER}.group_port"] * len(urls) if one_port else _places(f"{SERVER}.group_port", server.group_port)
        )
    if isinstance(server.min_servers, int) and server.min_servers > len(urls):
        remedy = "lower it, or name more servers"
        yield Mistake(
            path=f"{SERVER}.min_servers", found=show(server.min_servers), wanted=f"at most {len(urls)}", remedy=remedy
        )
    bad_urls = [_url_mistake(url, at) for url, at in zip(urls, url_at, strict=True)]
    yield from (mistake for mistake in bad_urls if mistake)
    if not any(bad_urls):
        yield from _port_mistakes(urls, ports, url_at, port_at)


def _paired_lists(server: ServerClientConfig) -> tuple[list[str], list[int]]:
    urls = [server.base_url] if isinstance(server.base_url, str) else list(server.base_url or ())
    port = server.group_port
    ports = [port + i for i in range(len(urls))] if isinstance(port, int) else list(port or ())
    return urls, ports


def _places(path: str, value: object) -> list[str]:
    return [f"{path}[{i}]" for i in range(len(value))] if isinstance(value, list | tuple) else [path]


def _form_mistakes(server: ServerClientConfig) -> Iterator[Mistake]:
    url, port = server.base_url, server.group_port
    if server.servers is not None:
        if url is not None or port is not None:
            found = "`servers` and " + " and ".join(
                n for n in ("base_url", "group_port") if getattr(server, n) is not None
            )
            remedy = "keep `servers` and remove the others (or set `servers: null` if it comes from a base)"
            yield Mistake(path=SERVER, found=found, wanted="exactly one form", remedy=remedy)
        elif not server.servers:
            remedy = f"name the servers, {WAY_OUT}"
            yield Mistake(path=f"{SERVER}.servers", found="an empty list", wanted="at least one server", remedy=remedy)
    elif url is None and port is None:
        wanted = "a list of {base_url, group_port}"
        yield Mistake(path=f"{SERVER}.servers", found="nothing", wanted=wanted, remedy=f"name the servers, {WAY_OUT}")
    elif port is None:
        remedy = f"add the port of the weight sync, {WAY_OUT}"
        yield Mistake(path=f"{SERVER}.group_port", found="nothing", wanted="one port, or one per URL", remedy=remedy)
    elif url is None:
        remedy = f"add the servers' URLs, {WAY_OUT}"
        yield Mistake(path=f"{SERVER}.base_url", found="nothing", wanted="a URL, or a list of URLs", remedy=remedy)
    else:
        yield from _pairing_mistakes(url, port)


def _discovery_mistakes(server: ServerClientConfig) -> Iterator[Mistake]:
    discovery = server.discovery
    if discovery is None or (discovery.file is None) != (discovery.command is None):
        return
    found = "neither" if discovery.file is None else "both"
    wanted, remedy = "either file or command", "name the one that lists the servers, or set discovery: null"
    yield Mistake(path=f"{SERVER}.discovery", found=found, wanted=wanted, remedy=remedy)


def _pairing_mistakes(url: str | list[str], port: int | list[int]) -> Iterator[Mistake]:
    path = f"{SERVER}.group_port"
    if isinstance(url, str):
        if not isinstance(port, int):
            wanted, remedy = "one integer, as base_url is one string", "write one port, or make base_url a list"
            yield Mistake(path=path, found=show(port), wanted=wanted, remedy=remedy)
    elif not url:
        remedy = f"name the servers, {WAY_OUT}"
        yield Mistake(path=f"{SERVER}.base_url", found="an empty list", wanted="at least one URL", remedy=remedy)
    elif isinstance(port, int):
        if port + len(url) - 1 > MAX_PORT:
            found = f"{port} for {len(url)} servers, which ends at {port + len(url) - 1}"
            yield Mistake(path=path, found=found, wanted=f"ports up to {MAX_PORT}", remedy="choose a lower first port")
    elif len(port) != len(url):
        found, wanted = f"{len(port)} ports for {len(url)} URLs", f"{len(url)} ports, paired by index"
        remedy = "give one port per URL, or one integer to count up from"
        yield Mistake(path=path, found=found, wanted=wanted, remedy=remedy)


def _url_mistake(url: str, at: str) -> Mistake | None:
    wanted, remedy = "a URL prefix such as http://127.0.0.1:8000", "write scheme, host and port"
    try:
        parts = urlsplit(url)
        port_is_wrong = parts.port == 0
    except ValueError:
        return Mistake(path=at, found=show(url), wanted=wanted, remedy=remedy)
    if parts.username is not None or parts.password is not None:
        remedy = f"remove user and password; the server's token is read from {TOKEN_VARIABLE}"
        return Mistake(path=at, found="a URL with credentials", wanted=wanted, remedy=remedy)
    if parts.query or parts.fragment:
        return Mistake(path=at, found=show(url), wanted=wanted, remedy="remove ? or # and what follows")
    bad = parts.scheme not in ("http", "https") or not parts.hostname or port_is_wrong or url != "".join(url.split())
    return Mistake(path=at, found=show(url), wanted=wanted, remedy=remedy) if bad else None


def _port_mistakes(urls: list[str], ports: list[int], url_at: list[str], port_at: list[str]) -> Iterator[Mistake]:
    """The same server twice, two groups on one host's port, or a group on the port that answers HTTP."""
    bases: dict[str, str] = {}
    groups: dict[tuple[str | None, int], str] = {}
    for url, port, here, port_here in zip(urls, ports, url_at, port_at, strict=True):
        base, parts = url.rstrip("/"), urlsplit(url)
        if base in bases:
            wanted = f"each server once (also at {bases[base]})"
            yield Mistake(path=here, found=show(url), wanted=wanted, remedy="remove one of the two")
        elif (parts.hostname, port) in groups:
            wanted = f"a port of its own on {parts.hostname} (also at {groups[parts.hostname, port]})"
            yield Mistake(path=port_here, found=str(port), wanted=wanted, remedy="choose another port")
        elif port == (parts.port or (443 if parts.scheme == "https" else 80)):
            wanted = "a port other than the HTTP port"
            yield Mistake(path=port_here, found=str(port), wanted=wanted, remedy="choose another port")
        bases.setdefault(base, here)
        groups.setdefault((parts.hostname, port), port_here)


ROLLOUT = "custom.extra.rollout_matching"
Rule = Callable[[RunConfig], Iterator[Mistake]]


def sync_mode(config: RunConfig) -> str:
    """`full` or `adapter`: `auto` follows `enable_lora` (R08)."""
    vllm = config.rollout_matching.vllm
    if vllm.sync.mode == "auto":
        return "adapter" if vllm.enable_lora else "full"
    return vllm.sync.mode


def uses_servers(config: RunConfig) -> bool:
    return config.rollout_matching.rollout_backend == "vllm" and config.rollout_matching.vllm.mode == "server"


def colocates(config: RunConfig) -> bool:
    """Whether vLLM runs inside the learner's job."""
    rollout = config.rollout_matching
    return rollout.rollout_backend == "vllm" and rollout.vllm.mode == "colocate" and needs_rollouts(config)


def learns_rollouts(config: RunConfig) -> bool:
    """Whether any step learns rollouts. `sft`, and a schedule without Channel-B, learn ground truth only."""
    if config.stage2_ab is not None:
        return config.stage2_ab.schedule.b_ratio > 0
    return config.custom.trainer_variant in ("rollout_matching_sft", "grpo")


def needs_rollouts(config: RunConfig) -> bool:
    """Whether the run makes rollouts at all, to learn or to evaluate."""
    training = config.training
    return bool(training.eval_on_start or training.eval_on_end or training.eval_steps) or learns_rollouts(config)


def overlaps(config: RunConfig) -> bool:
    """Whether Channel-B learns a step's first packs while the other rollouts of the step run (R32)."""
    stage2 = config.stage2_ab
    return (
        config.custom.trainer_variant in ("stage2_ab_training", "grpo")
        and config.training.packing
        and (stage2 is not None and stage2.schedule.b_ratio > 0)
    )


def given(section: Section, name: str) -> str:
    """The value of a number for a message, marked as the default if the user did not write it."""
    number = getattr(section, name)
    value = f"{number:g}" if isinstance(number, float) else str(number)
    return value if name in section.model_fields_set else f"the default {value}"


# ---- data, training ------------------------------------------------------------------------------------------------


def pixel_limits(config: RunConfig) -> Iterator[Mistake]:
    """`model.min_pixels` is not above `model.max_pixels`."""
    least, most = config.model.min_pixels, config.model.max_pixels
    if least is not None and most is not None and least > most:
        wanted, remedy = f"at most model.max_pixels ({most})", "correct one of the two"
        yield Mistake(path="model.min_pixels", found=str(least), wanted=wanted, remedy=remedy)


def prompt_has_a_use(config: RunConfig) -> Iterator[Mistake]:
    """`data.prompt` is for formats without messages; JSONL rows carry their own."""
    if config.data.prompt is not None and config.data.format == "jsonl":
        remedy = "remove it: JSONL rows carry their own messages"
        yield Mistake(path="data.prompt", found="a prompt for jsonl data", wanted="null", remedy=remedy)


def detection_keys_have_a_use(config: RunConfig) -> Iterator[Mistake]:
    """With `task.type: key_value`, the keys of the detection task in `task` and `loss` are not set (R38)."""
    if config.task.type != "key_value":
        return
    for path, section, model in (("task", config.task, TaskConfig), ("loss", config.loss, LossConfig)):
        for name, field in model.model_fields.items():
            if name not in ("type", "options", "function") and getattr(section, name) != field.default:
                found, wanted = given(section, name), "no such key: key_value does not read it"
                yield Mistake(path=f"{path}.{name}", found=found, wanted=wanted, remedy="remove it")


def run_length(config: RunConfig) -> Iterator[Mistake]:
    """Exactly one of `training.max_steps` and `training.num_train_epochs` is given."""
    steps, epochs = config.training.max_steps, config.training.num_train_epochs
    wanted = "exactly one of training.max_steps and training.num_train_epochs"
    if steps is None and epochs is None:
        remedy = "set one of them"
        yield Mistake(path="training.max_steps", found="no length of the run", wanted=wanted, remedy=remedy)
    if steps is not None and epochs is not None:
        remedy = "remove one (or set it to null if it comes from a base)"
        yield Mistake(path="training.max_steps", found="both", wanted=wanted, remedy=remedy)


def warmup_fits(config: RunConfig) -> Iterator[Mistake]:
    """`training.warmup_steps` is at most `training.max_steps`."""
    warmup, steps = config.training.warmup_steps, config.training.max_steps
    if steps is not None and warmup > steps:
        wanted, remedy = f"at most training.max_steps ({steps})", "lower it"
        yield Mistake(path="training.warmup_steps", found=str(warmup), wanted=wanted, remedy=remedy)


def evaluation_has_data(config: RunConfig) -> Iterator[Mistake]:
    """Evaluations need `data.val` or `data.test`."""
    training, data = config.training, config.data
    asked = [name for name in ("eval_steps", "eval_on_start", "eval_on_end") if getattr(training, name)]
    if asked and data.val is None and data.test is None:
        wanted, remedy = "data.val or data.test to evaluate on", "name the annotations, or remove this key"
        yield Mistake(path=f"training.{asked[0]}", found="no evaluation data", wanted=wanted, remedy=remedy)


def carry_packing(config: RunConfig) -> Iterator[Mistake]:
    """`rollout_matching_sft` with packing carries segments over (D6): `packing_buffer` holds at least
    `per_device_train_batch_size`, and with a `rollout_buffer` `packing_drop_last` is true."""
    training = config.training
    if config.custom.trainer_variant != "rollout_matching_sft" or not training.packing:
        return
    buffer = config.rollout_matching.rollout_buffer
    if not training.packing_drop_last and buffer is not None and buffer.enabled and buffer.m_steps > 1:
        wanted = "true: a run may end with an M-step, which learns what its window learned before and nothing else"
        remedy = f"remove it, or set {ROLLOUT}.rollout_buffer.enabled: false, or training.packing: false"
        yield Mistake(path="training.packing_drop_last", found="false", wanted=wanted, remedy=remedy)
    if training.packing_buffer < training.per_device_train_batch_size:
        wanted = f"at least training.per_device_train_batch_size ({training.per_device_train_batch_size})"
        remedy = "raise it: a micro-step brings that many segments, and one row may take only the first"
        found = given(training, "packing_buffer")
        yield Mistake(path="training.packing_buffer", found=found, wanted=wanted, remedy=remedy)


def keeping_what_was_cut(config: RunConfig) -> Iterator[Mistake]:
    """`loss.keep_unmatched` goes with `loss.prefix_end: first_miss` and `loss.missed_order: canonical`."""
    loss = config.loss
    if not loss.keep_unmatched:
        return
    for name, found, wanted in (
        ("prefix_end", loss.prefix_end, "first_miss"),
        ("missed_order", loss.missed_order, "canonical"),
    ):
        if found != wanted:
            remedy = f"set loss.{name}: {wanted}, or remove loss.keep_unmatched"
            yield Mistake(path=f"loss.{name}", found=found, wanted=f"{wanted}, for loss.keep_unmatched", remedy=remedy)


# ---- rollouts ------------------------------------------------------------------------------------------------------


def decode_mode_fits(config: RunConfig) -> Iterator[Mistake]:
    """`decode_mode` agrees with `temperature`: `sample` above 0, `greedy` and `beam` at 0. `beam` needs at least 2
    `num_beams` (D7)."""
    decoding, path = config.rollout_matching.decoding, f"{ROLLOUT}.decoding"
    mode, temperature = decoding.decode_mode, decoding.temperature
    if mode in ("greedy", "beam") and temperature > 0:
        wanted, remedy = f"temperature 0 with decode_mode: {mode}", "set temperature: 0, or decode_mode: sample"
        yield Mistake(path=f"{path}.temperature", found=f"{temperature:g}", wanted=wanted, remedy=remedy)
    if mode == "sample" and temperature == 0:
        found, wanted = given(decoding, "temperature"), "above 0 with decode_mode: sample"
        yield Mistake(
            path=f"{path}.temperature", found=found, wanted=wanted, remedy="raise it, or set decode_mode: greedy"
        )
    if mode == "beam" and decoding.num_beams == 1:
        found, wanted = given(decoding, "num_beams"), "at least 2 with decode_mode: beam"
        yield Mistake(
            path=f"{path}.num_beams", found=found, wanted=wanted, remedy="raise it, or set decode_mode: greedy"
        )
    if mode != "beam" and decoding.num_beams > 1:
        wanted, remedy = "1 without decode_mode: beam", "set decode_mode: beam, or remove it"
        yield Mistake(path=f"{path}.num_beams", found=str(decoding.num_beams), wanted=wanted, remedy=remedy)


def sampling_samples(config: RunConfig) -> Iterator[Mistake]:
    """`top_p` below 1 and `top_k` above 0 need a `temperature` above 0: greedy decoding and beam search ignore them
    (R29)."""
    decoding, path = config.rollout_matching.decoding, f"{ROLLOUT}.decoding"
    if decoding.temperature > 0:
        return
    found = f"with temperature 0 ({decoding.decode_mode or 'greedy'})"
    remedy = "remove it, or set temperature above 0"
    if decoding.top_p < 1.0:
        wanted = "1.0, as nothing is sampled"
        yield Mistake(path=f"{path}.top_p", found=f"{decoding.top_p:g} {found}", wanted=wanted, remedy=remedy)
    if decoding.top_k > 0:
        wanted = "-1 or 0, as nothing is sampled"
        yield Mistake(path=f"{path}.top_k", found=f"{decoding.top_k} {found}", wanted=wanted, remedy=remedy)


def beam_needs_hf(config: RunConfig) -> Iterator[Mistake]:
    """`decode_mode: beam` needs `rollout_backend: hf`."""
    if config.rollout_matching.decoding.decode_mode == "beam" and config.rollout_matching.rollout_backend == "vllm":
        found = f"beam with rollout_backend: vllm (vllm.mode: {config.rollout_matching.vllm.mode})"
        remedy = f"set {ROLLOUT}.rollout_backend: hf, or decode_mode: greedy"
        path = f"{ROLLOUT}.decoding.decode_mode"
        yield Mistake(path=path, found=found, wanted="greedy or sample", remedy=remedy)


def beams_fit(config: RunConfig) -> Iterator[Mistake]:
    """A beam search runs `num_beams` sequences for one sample, so `decode_batch_size` is at least that (R21, D10)."""
    rollout, beams = config.rollout_matching, config.rollout_matching.decoding.num_beams
    if rollout.decoding.decode_mode == "beam" and rollout.rollout_backend == "hf" and rollout.decode_batch_size < beams:
        wanted, remedy = f"at least num_beams ({beams})", "raise it, or lower decoding.num_beams"
        path = f"{ROLLOUT}.decode_batch_size"
        yield Mistake(path=path, found=given(rollout, "decode_batch_size"), wanted=wanted, remedy=remedy)


def rollout_fits(config: RunConfig) -> Iterator[Mistake]:
    """`max_new_tokens` is below `global_max_length`, because a segment holds prompt and answer, and below a colocated
    engine's `max_model_len`."""
    decoding = config.rollout_matching.decoding
    longest, found = decoding.max_new_tokens, given(decoding, "max_new_tokens")
    path = f"{ROLLOUT}.decoding.max_new_tokens"
    if config.custom.trainer_variant != "sft" and longest >= config.global_max_length:
        wanted = f"less than global_max_length ({config.global_max_length}), which holds prompt and answer"
        yield Mistake(path=path, found=found, wanted=wanted, remedy="lower it, or raise global_max_length")
    vllm = config.rollout_matching.vllm
    colocated = config.rollout_matching.rollout_backend == "vllm" and vllm.mode == "colocate"
    if colocated and vllm.max_model_len is not None and longest >= vllm.max_model_len:
        wanted = f"less than vllm.max_model_len ({vllm.max_model_len}), which holds prompt and answer"
        yield Mistake(path=path, found=found, wanted=wanted, remedy="lower it, or raise vllm.max_model_len")


def servers_are_named(config: RunConfig) -> Iterator[Mistake]:
    """`vllm.mode: server` needs servers, named in one of the two forms, with valid URLs and ports that do not clash
    (R05 R16)."""
    if uses_servers(config):
        yield from server_mistakes(config.rollout_matching.vllm.server)


def adapter_sync(config: RunConfig) -> Iterator[Mistake]:
    """Adapter sync needs `vllm.enable_lora`, and `model.lora` or an adapter's folder as `model.path`. DoRA also needs
    `sync.fallback_to_full` (R08)."""
    vllm, lora = config.rollout_matching.vllm, config.model.lora
    if config.rollout_matching.rollout_backend != "vllm" or sync_mode(config) != "adapter":
        return
    path = f"{ROLLOUT}.vllm.sync.mode"
    if not vllm.enable_lora:
        remedy = f"set {ROLLOUT}.vllm.enable_lora: true, or sync.mode: full"
        yield Mistake(path=path, found="adapter with enable_lora: false", wanted="enable_lora: true", remedy=remedy)
    if lora is None and not (Path(config.model.path) / "adapter_config.json").is_file():
        remedy = "add model.lora, or set sync.mode: full"
        yield Mistake(path=path, found="adapter sync of a model without adapter", wanted="model.lora", remedy=remedy)
    elif lora is not None and lora.type == "dora" and not vllm.sync.fallback_to_full:
        remedy = "set sync.mode: full, or fallback_to_full: true"
        found = "adapter sync of a DoRA adapter, with fallback_to_full: false"
        yield Mistake(path=path, found=found, wanted="plain LoRA: vLLM does not apply DoRA", remedy=remedy)


def buffer_variant(config: RunConfig) -> Iterator[Mistake]:
    """`rollout_buffer` goes with `rollout_matching_sft` and with `grpo` without `stage2_ab`; `stage2_ab_training`
    refuses the key, even null (D2)."""
    buffer, variant = config.rollout_matching.rollout_buffer, config.custom.trainer_variant
    path = f"{ROLLOUT}.rollout_buffer"
    if variant == "stage2_ab_training":
        if "rollout_buffer" in config.rollout_matching.model_fields_set:
            wanted = "no such key: staleness belongs to the asynchronous pipeline there"
            remedy = "remove it; for rollouts ahead of learning set stage2_ab.async_actor_learner.enabled"
            found = "null under" if buffer is None else "rollout reuse under"
            yield Mistake(path=path, found=f"{found} stage2_ab_training", wanted=wanted, remedy=remedy)
    elif variant == "grpo" and config.stage2_ab is not None and buffer is not None and buffer.enabled:
        wanted, remedy = "grpo without the section stage2_ab", "remove one of the two"
        yield Mistake(path=path, found="rollout reuse with stage2_ab", wanted=wanted, remedy=remedy)
    elif variant == "sft" and buffer is not None and buffer.enabled:
        wanted, remedy = "trainer_variant: rollout_matching_sft", "remove it: sft has no rollouts to reuse"
        yield Mistake(path=path, found="rollout reuse under sft", wanted=wanted, remedy=remedy)


def offload_can_be_served(config: RunConfig) -> Iterator[Mistake]:
    """With colocated vLLM, what `offload` moves away must not be trained at the same time (R20)."""
    rollout, offload = config.rollout_matching, config.rollout_matching.offload
    if rollout.rollout_backend != "vllm" or rollout.vllm.mode != "colocate" or not offload.enabled:
        return
    if not offload.offload_model and not offload.offload_optimizer:
        return
    path = f"{ROLLOUT}.offload.enabled"
    ahead = config.stage2_ab is not None and config.stage2_ab.async_actor_learner.enabled
    if ahead or overlaps(config):
        found = (
            "true, while " + ("the asynchronous learner" if ahead else "packed Channel-B") + " trains during rollouts"
        )
        wanted = "false, because rollouts and learning run at the same time"
        remedy = "set enabled: false (servers need no offloading)" + ("" if ahead else ", or training.packing: false")
        yield Mistake(path=path, found=found, wanted=wanted, remedy=remedy)


def best_of_has_a_use(config: RunConfig) -> Iterator[Mistake]:
    """`best_of` goes with `rollout_matching_sft` and `stage2_ab_training`; `use` and `min_reward` need more than one
    rollout per sample, and `min_reward` goes with `use: rejection` (R37)."""
    best, variant, path = config.rollout_matching.best_of, config.custom.trainer_variant, f"{ROLLOUT}.best_of"
    changed = [name for name, field in BestOfConfig.model_fields.items() if getattr(best, name) != field.default]
    if changed and variant not in ("rollout_matching_sft", "stage2_ab_training"):
        found, wanted = f"a section that {variant} does not read", "no such section"
        remedy = "set grpo.num_generations instead" if variant == "grpo" else "remove it: sft has no rollouts"
        yield Mistake(path=path, found=found, wanted=wanted, remedy=remedy)
    elif changed and best.rollouts_per_sample == 1:
        found, wanted = f"{', '.join(changed)} with one rollout per sample", "rollouts_per_sample above 1"
        yield Mistake(path=path, found=found, wanted=wanted, remedy="raise rollouts_per_sample, or remove the section")
    elif best.min_reward is not None and best.use != "rejection":
        remedy = "remove it, or set use: rejection"
        found = f"{best.min_reward:g} with use: {best.use}"
        yield Mistake(path=f"{path}.min_reward", found=found, wanted="use: rejection", remedy=remedy)


def best_of_samples(config: RunConfig) -> Iterator[Mistake]:
    """`best_of` draws its rollouts: `decoding.temperature` is above 0 (R37)."""
    decoding, number = config.rollout_matching.decoding, config.rollout_matching.best_of.rollouts_per_sample
    if number > 1 and decoding.mode != "sample":
        wanted = f"sampling: {number} rollouts of a sample that are decoded by {decoding.mode} are all the same"
        remedy = f"set {ROLLOUT}.decoding.temperature above 0 (1.0), or best_of.rollouts_per_sample: 1"
        found = f"{decoding.mode} decoding"
        yield Mistake(path=f"{ROLLOUT}.decoding.temperature", found=found, wanted=wanted, remedy=remedy)


def best_of_union(config: RunConfig) -> Iterator[Mistake]:
    """`best_of.use: union` goes with `loss.missed_order: canonical`, and not with `task.type: key_value` (R37)."""
    if config.rollout_matching.best_of.use != "union":
        return
    if config.task.type == "key_value":
        remedy = "set use: best"
        wanted = "a task that can merge answers, such as detection"
        yield Mistake(path=f"{ROLLOUT}.best_of.use", found="union with key_value", wanted=wanted, remedy=remedy)
    if config.loss.missed_order != "canonical":
        wanted, remedy = "canonical, for best_of.use: union", "set it to canonical, or set best_of.use: best"
        yield Mistake(path="loss.missed_order", found=config.loss.missed_order, wanted=wanted, remedy=remedy)


def rewards_exist(config: RunConfig) -> Iterator[Mistake]:
    """`grpo` and `best_of` need a reward: detection has its own, another task needs `reward.functions`, or
    `reward.weights` of rewards of its own (R37 R38)."""
    variant, number = config.custom.trainer_variant, config.rollout_matching.best_of.rollouts_per_sample
    if variant != "grpo" and number == 1:
        return
    own_task = config.task.type not in ("detection", "key_value")
    if config.task.type == "detection" or config.reward.functions or (own_task and config.reward.weights):
        return
    found = f"no reward with task.type: {config.task.type}"
    wanted = f"one, because {'grpo' if variant == 'grpo' else 'best_of'} compares rollouts by it"
    remedy = "name functions in reward.functions"
    yield Mistake(path="reward.functions", found=found, wanted=wanted, remedy=remedy)


# ---- stage2_ab -----------------------------------------------------------------------------------------------------


def stage2_section(config: RunConfig) -> Iterator[Mistake]:
    """`stage2_ab_training` needs the section `stage2_ab`, `grpo` may have it; the other variants refuse it (R26)."""
    variant, stage2 = config.custom.trainer_variant, config.stage2_ab
    if variant == "stage2_ab_training" and stage2 is None:
        remedy = "add `stage2_ab: {schedule: {b_ratio: ...}}`"
        wanted = "the share of Channel-B steps, in [0, 1]"
        yield Mistake(path="stage2_ab.schedule.b_ratio", found="nothing", wanted=wanted, remedy=remedy)
    if variant not in ("stage2_ab_training", "grpo") and stage2 is not None:
        remedy = "remove the section, or set custom.trainer_variant: stage2_ab_training"
        found, wanted = f"a section that {variant} does not read", "no such section"
        yield Mistake(path="stage2_ab", found=found, wanted=wanted, remedy=remedy)


def stage2_batch(config: RunConfig) -> Iterator[Mistake]:
    """The section `stage2_ab` needs `training.effective_batch_size`, its rollouts per step (D8 R31)."""
    variant = config.custom.trainer_variant
    schedules = variant == "stage2_ab_training" or (variant == "grpo" and config.stage2_ab is not None)
    if schedules and config.training.effective_batch_size is None:
        wanted = "the rollouts per optimizer step, over all ranks"
        remedy = "add it (a multiple of per_device_train_batch_size x ranks)"
        yield Mistake(path="training.effective_batch_size", found="nothing", wanted=wanted, remedy=remedy)


def overlap_needs_servers(config: RunConfig) -> Iterator[Mistake]:
    """Packed Channel-B learns while rollouts run, so it needs `vllm.mode: server` (R32)."""
    if overlaps(config) and not uses_servers(config):
        rollout = config.rollout_matching
        backend = "rollout_backend: hf" if rollout.rollout_backend == "hf" else f"vllm.mode: {rollout.vllm.mode}"
        wanted = "rollout_backend: vllm and vllm.mode: server, because packed Channel-B learns while rollouts run"
        remedy = f"set {ROLLOUT}.vllm.mode: server and {SERVER}.servers, or training.packing: false (no overlap)"
        yield Mistake(path=f"{ROLLOUT}.vllm.mode", found=backend, wanted=wanted, remedy=remedy)


def async_needs_servers(config: RunConfig) -> Iterator[Mistake]:
    """`async_actor_learner` needs `vllm.mode: server` and full sync (D3 R25)."""
    if config.stage2_ab is None or not config.stage2_ab.async_actor_learner.enabled:
        return
    path = "stage2_ab.async_actor_learner.enabled"
    if not uses_servers(config):
        remedy = f"set {ROLLOUT}.rollout_backend: vllm and vllm.mode: server, or enabled: false"
        yield Mistake(path=path, found="true without servers", wanted="vllm.mode: server", remedy=remedy)
    elif sync_mode(config) != "full":
        remedy = f"set {ROLLOUT}.vllm.sync.mode: full, or enabled: false"
        yield Mistake(path=path, found="true with adapter sync", wanted="full weight sync", remedy=remedy)


def async_queue(config: RunConfig) -> Iterator[Mistake]:
    """`prefetch_target_packs` is at most `queue_limit` (R25)."""
    if config.stage2_ab is None:
        return
    queue = config.stage2_ab.async_actor_learner
    if queue.prefetch_target_packs > queue.queue_limit:
        path = "stage2_ab.async_actor_learner.prefetch_target_packs"
        wanted, remedy = f"at most queue_limit ({queue.queue_limit})", "lower it, or raise queue_limit"
        yield Mistake(path=path, found=given(queue, "prefetch_target_packs"), wanted=wanted, remedy=remedy)


# ---- grpo ----------------------------------------------------------------------------------------------------------


def grpo_has_a_use(config: RunConfig) -> Iterator[Mistake]:
    """The section `grpo` goes with `trainer_variant: grpo`, which takes no `loss.function` (R37)."""
    variant = config.custom.trainer_variant
    # A resolved configuration has every section, so defaults are no mistake.
    is_set = any(getattr(config.grpo, name) != field.default for name, field in GrpoConfig.model_fields.items())
    if variant != "grpo" and is_set:
        remedy = "remove the section, or set custom.trainer_variant: grpo"
        yield Mistake(path="grpo", found=f"a section that {variant} does not read", wanted="none", remedy=remedy)
    if variant == "grpo" and config.loss.function is not None:
        remedy = "unset it; rewards of your own go into reward.functions"
        wanted = "null: grpo has its own loss"
        yield Mistake(path="loss.function", found=show(config.loss.function), wanted=wanted, remedy=remedy)


def grpo_batches(config: RunConfig) -> Iterator[Mistake]:
    """With `grpo`, `per_device_train_batch_size` is a multiple of `num_generations` (R37)."""
    if config.custom.trainer_variant != "grpo":
        return
    size, batch = config.grpo.num_generations, config.training.per_device_train_batch_size
    if batch % size:
        wanted = f"a multiple of grpo.num_generations ({size}): it counts rollouts, and a group stays on one rank"
        remedy = f"set it to {-(-batch // size) * size}, or change grpo.num_generations"
        found = given(config.training, "per_device_train_batch_size")
        yield Mistake(path="training.per_device_train_batch_size", found=found, wanted=wanted, remedy=remedy)


def grpo_samples(config: RunConfig) -> Iterator[Mistake]:
    """`grpo` learns the probabilities that rollouts were drawn by: temperature 1, and nothing cut off (R37)."""
    if config.custom.trainer_variant != "grpo":
        return
    decoding, path = config.rollout_matching.decoding, f"{ROLLOUT}.decoding"
    wanted: tuple[tuple[str, float], ...] = (("temperature", 1.0), ("top_p", 1.0), ("repetition_penalty", 1.0))
    for name, value in wanted:
        if getattr(decoding, name) != value:
            text = f"{value:g}, so that rollouts are drawn by the probabilities that are learned"
            yield Mistake(
                path=f"{path}.{name}", found=given(decoding, name), wanted=text, remedy=f"set it to {value:g}"
            )
    if decoding.top_k > 0 or decoding.mode != "sample":
        name = "top_k" if decoding.top_k > 0 else "decode_mode"
        text = "sampling from all tokens, so that rollouts are drawn by the probabilities that are learned"
        found = str(getattr(decoding, name) if name == "top_k" else decoding.mode)
        if name == "top_k" or decoding.temperature == 1.0:
            yield Mistake(path=f"{path}.{name}", found=found, wanted=text, remedy="remove the key")


def grpo_reference(config: RunConfig) -> Iterator[Mistake]:
    """`grpo.kl_weight` above 0 needs an adapter, and a model that is not sharded: the reference is the model without
    its adapter (R37)."""
    if config.custom.trainer_variant != "grpo" or config.grpo.kl_weight == 0:
        return
    remedy = "add model.lora, or set grpo.kl_weight: 0"
    if config.model.lora is None and not (Path(config.model.path) / "adapter_config.json").is_file():
        found = f"{given(config.grpo, 'kl_weight')} without an adapter"
        wanted = "model.lora: the reference is the model without its adapter"
        yield Mistake(path="grpo.kl_weight", found=found, wanted=wanted, remedy=remedy)
    elif config.model.sharding != "none":
        found = f"{given(config.grpo, 'kl_weight')} with model.sharding: {config.model.sharding}"
        yield Mistake(path="grpo.kl_weight", found=found, wanted="model.sharding: none", remedy="set grpo.kl_weight: 0")


def grpo_overlong(config: RunConfig) -> Iterator[Mistake]:
    """`grpo.overlong_tokens` is below `decoding.max_new_tokens` (R37)."""
    longest = config.rollout_matching.decoding.max_new_tokens
    if config.custom.trainer_variant == "grpo" and config.grpo.overlong_tokens >= longest:
        wanted = f"fewer than {ROLLOUT}.decoding.max_new_tokens ({longest}): the end of an answer, not all of it"
        found = given(config.grpo, "overlong_tokens")
        yield Mistake(path="grpo.overlong_tokens", found=found, wanted=wanted, remedy="lower it")


def grpo_mix(config: RunConfig) -> Iterator[Mistake]:
    """`grpo.sft_weight` and `grpo.matching_weight` mix within a step; with the section `stage2_ab` Channel-A is the
    teacher forcing, and Channel-B has one segment per rollout (R37)."""
    if config.custom.trainer_variant != "grpo" or config.stage2_ab is None:
        return
    for name, wanted, remedy in (
        ("sft_weight", "whose Channel-A is teacher forcing", ", and lower stage2_ab.schedule.b_ratio"),
        ("matching_weight", "whose Channel-B learns each rollout once", ", or remove stage2_ab"),
    ):
        if getattr(config.grpo, name):
            yield Mistake(
                path=f"grpo.{name}",
                found=given(config.grpo, name),
                wanted=f"0 with the section stage2_ab, {wanted}",
                remedy=f"set grpo.{name}: 0{remedy}",
            )


def grpo_refills(config: RunConfig) -> Iterator[Mistake]:
    """`grpo.max_refills` needs `grpo.skip_no_signal` and `training.max_steps`, and goes neither with `stage2_ab`, whose
    steps are shares of an epoch, nor with a `rollout_buffer`, whose windows have a fixed size (R37)."""
    if config.custom.trainer_variant != "grpo" or not config.grpo.max_refills:
        return
    path, found, off = "grpo.max_refills", given(config.grpo, "max_refills"), "set grpo.max_refills: 0"
    buffer = config.rollout_matching.rollout_buffer
    if not config.grpo.skip_no_signal:
        wanted = "true with grpo.max_refills: groups that are replaced must not count in the mean"
        yield Mistake(path="grpo.skip_no_signal", found="false", wanted=wanted, remedy=f"set it to true, or {off}")
    if config.training.max_steps is None:
        wanted = "training.max_steps: a step takes as much data as it needs, so epochs do not tell the run's length"
        remedy = f"replace training.num_train_epochs, or {off}"
        yield Mistake(path="training.max_steps", found="no number of steps", wanted=wanted, remedy=remedy)
    if config.stage2_ab is not None:
        wanted = "0 with the section stage2_ab, whose steps are fixed shares of an epoch"
        yield Mistake(path=path, found=found, wanted=wanted, remedy=f"{off}, or remove stage2_ab")
    if buffer is not None and buffer.enabled and buffer.m_steps > 1:
        wanted = "0 with a rollout_buffer, which learns the same micro-batches again"
        yield Mistake(path=path, found=found, wanted=wanted, remedy=f"{off}, or {ROLLOUT}.rollout_buffer: null")


RULES: tuple[Rule, ...] = (
    pixel_limits,
    prompt_has_a_use,
    detection_keys_have_a_use,
    run_length,
    warmup_fits,
    evaluation_has_data,
    carry_packing,
    keeping_what_was_cut,
    decode_mode_fits,
    sampling_samples,
    beam_needs_hf,
    beams_fit,
    rollout_fits,
    servers_are_named,
    adapter_sync,
    buffer_variant,
    offload_can_be_served,
    best_of_has_a_use,
    best_of_samples,
    best_of_union,
    rewards_exist,
    stage2_section,
    stage2_batch,
    overlap_needs_servers,
    async_needs_servers,
    async_queue,
    grpo_has_a_use,
    grpo_batches,
    grpo_samples,
    grpo_reference,
    grpo_overlong,
    grpo_mix,
    grpo_refills,
)
