"""Which conversation uses which cached block: the prefixes of conversations, as a tree over the names of blocks.

A `Node` is a block's name with its parent. It exists while the block pool, or the host's, has a block of that name. A
`Prefix` is what one conversation has computed; where conversations part, the common beginning becomes a *shared* prefix
of its own, the `base` of both. A request without a conversation id continues the prefix whose last block it extends.

A sequence is linked when it leaves its slot. That visits only the blocks that are new since its conversation's last
turn, and those above them that it shares for the first time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container
from dataclasses import dataclass, field

from scheduler_svc.policy.prefix_view import Gaps, Returns

TIERS = 2
"""The block pool (0) and the host pool (1)."""
BIT = (1, 2)
"""Of each tier in `Node.tiers`."""
CHILD, CHILDREN = (1, 1 << 32), ((1 << 32) - 1, ((1 << 32) - 1) << 32)
"""Of each tier in `Node.children`: the unit, and the mask."""
UNCOPIED_CHILD, UNCOPIED = 1 << 64, ((1 << 32) - 1) << 64
"""In `Node.children`, of those that only the block pool has: the unit, and the mask."""
BOTH = BIT[0] | BIT[1]
_UNITS = (0, CHILD[0] + UNCOPIED_CHILD, CHILD[1], CHILD[0] + CHILD[1])
"""What a node adds to `children` of its parent, by its tiers."""
MOST_TENANTS = 4096
"""Maximum number of tenants with records of their own; further ones share one."""
MOST_CONVERSATIONS = 16_384
"""Maximum number of conversations that are remembered, longest unused ones go first; their blocks stay."""
OTHERS = "\0others"
"""Not a valid tenant: metadata can't carry this name."""


@dataclass(slots=True, eq=False)
class Tenant:
    """What a tenant has in the pools, and how often its conversations came back."""

    name: str
    blocks: list[int] = field(default_factory=lambda: [0] * TIERS)
    first: Returns = field(default_factory=Returns)
    """Of first turns."""
    later: Returns = field(default_factory=Returns)


@dataclass(slots=True, eq=False)
class Prefix:
    """A conversation's context, or what several share."""

    tenant: Tenant
    conversation: str = ""
    base: Prefix | None = None
    tail: Node | None = None
    """Its last block at its last end."""
    shared: bool = False
    users: int = 1
    tokens: int = 0
    turns: int = 0
    ended_at: float = 0.0
    retain_s: float | None = None
    next_turn_s: float | None = None
    gaps: Gaps = field(default_factory=Gaps)
    value: float = 0.0
    """What the policy `valued_by` returned last, at `valued_at`; below 0 asks again."""
    valued_at: float = -1.0
    valued_for_s: float = 0.0
    """For how long that value is used."""
    valued_by: object = None
    is_awaited: bool = False
    """Whether a request of the conversation was under way then."""


class Node:
    """A name. There is one for each cached block, so it is small: without lists, which would cost three times as much.

    `tiers`: bit T is set if tier T has the name. `children`: for tier T the nodes there that have this one as parent,
    in units of `CHILD[T]`; and those that only the block pool has, in units of `UNCOPIED_CHILD`.
    """

    __slots__ = ("children", "name", "parent", "prefix", "tiers")

    def __init__(self, name: bytes, prefix: Prefix, parent: Node | None = None) -> None:
        self.name = name
        self.prefix = prefix
        self.parent = parent
        self.tiers = 0
        self.children = 0

    def is_in(self, tier: int) -> bool:
        """Whether the tier has the name."""
        return bool(self.tiers & BIT[tier])

    def num_children(self, tier: int) -> int:
        """Returns how many nodes in the tier have this one as parent."""
        return (self.children & CHILDREN[tier]) // CHILD[tier]


@dataclass(slots=True, frozen=True)
class Turn:
    """A request whose sequence leaves its slot."""

    tenant: str
    conversation: str
    arrival_s: float
    now_s: float
    ended: bool
    """Whether it has ended; otherwise it was preempted, and comes back by itself."""
    retain_s: float | None = None
    next_turn_s: float | None = None


class PrefixTree:
    """The prefixes of one runner's pools. All operations are O(1) per new block."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.nodes: dict[bytes, Node] = {}
        self.num_copied = 0
        """Names that both tiers have."""
        self.gaps, self.shared_gaps = Gaps(), Gaps()
        """Of all conversations, and of all shared prefixes."""
        self._tenants: dict[str, Tenant] = {}
        self._num_tenants = [0] * TIERS  # with blocks in the tier
        self._by_key: OrderedDict[tuple[str, str], Prefix] = OrderedDict()
        self.unknown = Prefix(self.tenant(""))
        """Owner of blocks that no linked sequence had: those found after a restart."""
        self.left = Prefix(self.tenant(""))
        """Owner of blocks that their conversation has left: it went on from an earlier one."""

    def tenant(self, name: str) -> Tenant:
        """Returns the tenant's record."""
        record = self._tenants.get(name)
        if record is None:
            if len(self._tenants) >= MOST_TENANTS and name != OTHERS:
                return self.tenant(OTHERS)
            record = self._tenants[name] = Tenant(name)
        return record

    def num_tenants(self, tier: int) -> int:
        """Returns the number of tenants with blocks in the tier."""
        return self._num_tenants[tier]

    @property
    def num_conversations(self) -> int:
        """Conversations that are remembered."""
        return len(self._by_key)

    def find(self, tenant: str, conversation: str) -> Prefix | None:
        """Returns the conversation's prefix, of which perhaps nothing is cached any more; None if it is not known."""
        return self._by_key.get((tenant, conversation))

    def names(self, prefix: Prefix, own: bool = False) -> list[bytes]:
        """Returns the names of the prefix, from the last block to the first; `own`: without what others share."""
        names, node = [], prefix.tail
        while node is not None and not (own and node.prefix is not prefix):
            names.append(node.name)
            node = node.parent
        return names

    # ------------------------------------------------------------------ linking

    def link(self, names: list[bytes], turn: Turn, named: Container[bytes]) -> Node | None:
        """Links the full blocks of a leaving sequence, `names` from the first on; returns the last one's node, None if
        there is none. `named`: the names that the pool has."""
        count = len(names)
        while count and names[count - 1] not in named:
            count -= 1
        if not count:
            return None
        names = names[:count]
        first, junction = self._junction(names)
        prefix = self._prefix_for(turn, junction, len(names) - first)
        parent, nodes = junction, self.nodes
        for name in names[first:]:
            if name not in named:
                continue
            if name in nodes:
                parent = self._adopt(nodes[name], parent, prefix)
            else:
                parent = nodes[name] = Node(name, prefix, parent)
        self._note(prefix, turn, parent, len(names) * self.block_size)
        return parent

    def _junction(self, names: list[bytes]) -> tuple[int, Node | None]:
        """Returns the number of leading names that are linked already, and the node of the last of them."""
        for index in range(len(names) - 1, -1, -1):
            node = self.nodes.get(names[index])
            if node is not None and node.prefix is not self.unknown:
                return index + 1, node
        return 0, None

    def _prefix_for(self, turn: Turn, junction: Node | None, num_new: int) -> Prefix:
        """Returns the prefix that the sequence belongs to, with what it shares made shared."""
        key = (turn.tenant, turn.conversation)
        own = self._by_key.get(key) if turn.conversation else None
        if own is not None:
            self._by_key.move_to_end(key)
        if junction is None:
            return own or self._new(turn)
        owner = junction.prefix
        nameless = not (turn.conversation or owner.conversation or owner.shared)
        if nameless and owner.tail is junction and owner.tenant is self.tenant(turn.tenant):
            return owner  # a conversation without an id goes on
        if owner is own:
            if own.tail is not junction and num_new:
                self._leave(own, junction)
            return own
        prefix = own or self._new(turn)
        if prefix.base is not owner or not owner.shared:
            prefix.base = self._shared(owner, junction)
        return prefix

    def _new(self, turn: Turn) -> Prefix:
        prefix = Prefix(self.tenant(turn.tenant), turn.conversation)
        if turn.conversation:
            self._by_key[turn.tenant, turn.conversation] = prefix
            if len(self._by_key) > MOST_CONVERSATIONS:
                self._by_key.popitem(last=False)
        return prefix

    def _shared(self, owner: Prefix, junction: Node) -> Prefix:
        """Returns the shared prefix that ends with `junction`, made of its owner's blocks if it is not one yet."""
        if owner.shared:
            owner.users += 1
            return owner
        shared = Prefix(owner.tenant, base=owner.base, tail=junction, shared=True, users=2)
        shared.turns, shared.ended_at, shared.valued_at = owner.turns, owner.ended_at, -1.0
        node: Node | None = junction
        while node is not None and node.prefix is owner:
            self._own(node, shared)
            shared.tokens += self.block_size
            node = node.parent
        if node is not None:
            shared.tokens += node.prefix.tokens
        owner.base = shared
        return shared

    def _leave(self, prefix: Prefix, junction: Node) -> None:
        """Gives up the blocks below `junction`, where the conversation goes on differently."""
        node = prefix.tail
        while node is not None and node is not junction and node.prefix is prefix:
            self._own(node, self.left)
            node = node.parent

    def _adopt(self, node: Node, parent: Node | None, prefix: Prefix) -> Node:
        """Gives a node without a known owner to the prefix, with its place in the tree."""
        if node.parent is not parent:
            units = _UNITS[node.tiers]
            if node.parent is not None:
                node.parent.children -= units
            if parent is not None:
                parent.children += units
            node.parent = parent
        self._own(node, prefix)
        return node

    def _own(self, node: Node, prefix: Prefix) -> None:
        """Gives the node to another prefix."""
        former, tenant = node.prefix.tenant, prefix.tenant
        if former is not tenant:
            for tier in range(TIERS):
                if node.tiers & BIT[tier]:
                    self._charge(former, tier, -1)
                    self._charge(tenant, tier, 1)
        node.prefix = prefix

    def _note(self, prefix: Prefix, turn: Turn, tail: Node | None, tokens: int) -> None:
        """Notes that a request of the prefix ended, and that all that it shares was used."""
        prefix.tail, prefix.tokens, prefix.valued_at = tail, tokens, -1.0
        if not turn.ended:
            return
        returns = prefix.tenant.later if prefix.turns > 1 else prefix.tenant.first
        if prefix.turns and turn.arrival_s >= prefix.ended_at:
            prefix.gaps.add(turn.arrival_s - prefix.ended_at)
            self.gaps.add(turn.arrival_s - prefix.ended_at)
            returns.come_back()
        prefix.turns += 1
        (prefix.tenant.later if prefix.turns > 1 else prefix.tenant.first).end()
        prefix.ended_at, prefix.retain_s, prefix.next_turn_s = turn.now_s, turn.retain_s, turn.next_turn_s
        base = prefix.base
        while base is not None:
            gap_s = max(0.0, turn.arrival_s - base.ended_at)
            base.gaps.add(gap_s)
            self.shared_gaps.add(gap_s)
            base.turns, base.ended_at, base.valued_at = base.turns + 1, max(base.ended_at, turn.now_s), -1.0
            base = base.base

    # ------------------------------------------------------------------ what the pools report

    def came(self, name: bytes, tier: int) -> Node:
        """Returns the node of a name that the tier has now."""
        node = self.nodes.get(name)
        if node is None:
            node = self.nodes[name] = Node(name, self.unknown)
        if not node.tiers & BIT[tier]:
            self._set(node, node.tiers | BIT[tier])
            self._charge(node.prefix.tenant, tier, 1)
        return node

    def went(self, name: bytes, tier: int) -> Node | None:
        """Takes note that the tier no longer has the name; returns the parent's node if it has no child there now."""
        node = self.nodes.get(name)
        return None if node is None else self.leave(node, tier)

    def leave(self, node: Node, tier: int, stays: bool = False) -> Node | None:
        """Takes note that the tier no longer has the node; returns its parent if that has no child there now.

        `stays`: it is not dropped, although no tier is known to have it.
        """
        parent, tiers = node.parent, node.tiers
        if tiers & BIT[tier]:
            node.tiers = left = tiers ^ BIT[tier]  # inlined `_set`
            self.num_copied -= tiers == BOTH
            if parent is not None:
                parent.children += _UNITS[left] - _UNITS[tiers]
            self._charge(node.prefix.tenant, tier, -1)
        if not (node.tiers or stays):
            del self.nodes[node.name]
            if node.prefix.tail is node:
                self._shorten(node.prefix, parent)
        return parent if parent is not None and not parent.children & CHILDREN[tier] else None

    def _set(self, node: Node, tiers: int) -> None:
        """Notes the tiers that have the node's name now."""
        self.num_copied += (tiers == BOTH) - (node.tiers == BOTH)
        if node.parent is not None:
            node.parent.children += _UNITS[tiers] - _UNITS[node.tiers]
        node.tiers = tiers

    def _charge(self, tenant: Tenant, tier: int, by: int) -> None:
        """Adds to the tenant's blocks in a tier."""
        blocks = tenant.blocks
        blocks[tier] += by
        if not blocks[tier]:
            self._num_tenants[tier] -= 1
        elif blocks[tier] == by:  # it had none
            self._num_tenants[tier] += 1

    def _shorten(self, prefix: Prefix, end: Node | None) -> None:
        """Makes a prefix that has lost its last block end before that."""
        alive = end is not None and end.prefix is prefix and self.nodes.get(end.name) is end
        prefix.tail = end if alive else None
