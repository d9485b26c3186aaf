// SPDX-License-Identifier: GPL-2.0 OR Apache-2.0
/*
 * Who moves bytes over the network: counts of TCP payload by cgroup, flight,
 * class, locality. The kernel's own socket counters are read when a connection
 * begins and ends and whenever user space walks the sockets; no code runs per
 * packet or system call. See NETWORK.md in the folder above.
 *
 * Every count is "what the socket says now, minus what was taken before", the
 * latter raised atomically and never lowered. So two programs, two walks, an old
 * agent and a new one may all count at the same time: what one takes the other
 * finds taken, and one that read before the other did takes nothing.
 */
#include "kernel.h"

char LICENSE[] SEC("license") = "Dual BSD/GPL";

/* Set by the loader. */
const volatile __u64 scope;     /* cgroup below which this node is; 0: the whole machine */
const volatile __u32 mark_base; /* SO_MARK of class c is mark_base + c; 0: marks say nothing */
const volatile __u32 rows;      /* whether the walk writes a row for each busy socket */

enum locality { UNSETTLED, LOOPBACK, SAME_NODE, OFF_NODE };
enum transport { TCP, NON_TCP };

/* What is remembered of a socket. User space writes one itself, before the
 * socket is connected or bound, to say class and flight: a tag. */
struct sock_state {
	__u64 cgroup;
	__u64 since; /* when it was connected, by the clock since boot, nanoseconds */
	__u64 sent, retransmitted, received; /* taken so far */
	__u32 segs_out, segs_in;
	__u32 flight;
	__u8 class;
	__u8 locality;
	__u8 state; /* NEW, OPEN, or SHUT once its last bytes are taken */
	__u8 pad;
	__u32 fin; /* 1 once the other side's FIN, which counts as a byte, was taken off */
	__u32 first; /* sequence number of the first byte sent */
};
enum { NEW, OPEN, SHUT };

struct key {
	__u64 cgroup;
	__u32 flight;
	__u8 class;
	__u8 locality;
	__u8 transport;
	__u8 pad;
};

/* Order and meaning are traffic.Counts. */
struct counts {
	__u64 received, transmitted_all, retransmitted, received_headers, transmitted_headers;
};

struct address {
	__be32 a[4]; /* IPv4 as ::ffff:a.b.c.d */
};

/* The end that made a connection, as it and who accepted it know it: ports are
 * used by several connections at a time and again, sequence numbers are not. */
struct end {
	struct address address;
	__u32 port;  /* host order */
	__u32 first; /* sequence number of its first byte */
};

struct range {
	__u32 bits;
	struct address address;
};

/* A busy socket, as the walk tells it. */
struct row {
	__u64 cgroup;
	__u64 received, transmitted; /* since the walk before */
	__u32 retransmitted;
	__u32 srtt_us; /* smoothed round trip, microseconds */
	__u8 class;
	__u8 locality;
	__u8 pad[6];
};

enum status { SEEN, UNTRACKED, KEY_LOST, SEEDED, STATUSES };

struct {
	__uint(type, MAP_SK_STORAGE);
	/* CLONE: a connection has the tag of the listener that accepted it. */
	__uint(map_flags, F_NO_PREALLOC | F_CLONE);
	__type(key, int);
	__type(value, struct sock_state);
} socks SEC(".maps");

struct {
	__uint(type, MAP_HASH);
	__uint(max_entries, 16384);
	__type(key, struct key);
	__type(value, struct counts);
} acct SEC(".maps");

struct {
	__uint(type, MAP_HASH);
	__uint(max_entries, 4096);
	__type(key, __u32);
	__type(value, __u32);
} ports SEC(".maps"); /* service port -> class */

struct {
	__uint(type, MAP_LPM_TRIE);
	__uint(max_entries, 4096);
	__uint(map_flags, F_NO_PREALLOC);
	__type(key, struct range);
	__type(value, __u32);
} ranges SEC(".maps"); /* other side's address -> class */

/* Addresses that sockets of this node have, with the time of the last
 * connection, and the far ends of the connections they accepted: who connects to
 * one of the former, or is one of the latter, talks within the node, even through
 * an address that was translated. Addresses move to other nodes, so what is older
 * than the connection in question says nothing. */
struct {
	__uint(type, MAP_LRU_HASH);
	__uint(max_entries, 8192);
	__type(key, struct address);
	__type(value, __u64);
} here SEC(".maps");

struct {
	__uint(type, MAP_LRU_HASH);
	__uint(max_entries, 65536);
	__type(key, struct end);
	__type(value, __u32);
} accepted SEC(".maps");

struct {
	__uint(type, MAP_ARRAY);
	__uint(max_entries, STATUSES);
	__type(key, __u32);
	__type(value, __u64);
} status SEC(".maps");

INLINE void note(__u32 what)
{
	__u64 *n = bpf_map_lookup_elem(&status, &what);

	if (n)
		__sync_fetch_and_add(n, 1);
}

INLINE bool v4(struct sock *sk)
{
	return sk->__sk_common.skc_family == AF_INET;
}

/* done gives 1 where the other side's FIN was counted, which is a byte to TCP. */
INLINE __u32 done(struct sock *sk)
{
	return (sk->__sk_common.skc_flags >> SOCK_DONE_) & 1;
}

INLINE void local_address(struct sock *sk, struct address *to)
{
	if (v4(sk)) {
		to->a[0] = to->a[1] = 0;
		to->a[2] = bpf_htonl(0xffff);
		to->a[3] = sk->__sk_common.skc_rcv_saddr;
		return;
	}
	to->a[0] = sk->__sk_common.skc_v6_rcv_saddr.in6_u.u6_addr32[0];
	to->a[1] = sk->__sk_common.skc_v6_rcv_saddr.in6_u.u6_addr32[1];
	to->a[2] = sk->__sk_common.skc_v6_rcv_saddr.in6_u.u6_addr32[2];
	to->a[3] = sk->__sk_common.skc_v6_rcv_saddr.in6_u.u6_addr32[3];
}

INLINE void remote_address(struct sock *sk, struct address *to)
{
	if (v4(sk)) {
		to->a[0] = to->a[1] = 0;
		to->a[2] = bpf_htonl(0xffff);
		to->a[3] = sk->__sk_common.skc_daddr;
		return;
	}
	to->a[0] = sk->__sk_common.skc_v6_daddr.in6_u.u6_addr32[0];
	to->a[1] = sk->__sk_common.skc_v6_daddr.in6_u.u6_addr32[1];
	to->a[2] = sk->__sk_common.skc_v6_daddr.in6_u.u6_addr32[2];
	to->a[3] = sk->__sk_common.skc_v6_daddr.in6_u.u6_addr32[3];
}

INLINE bool mapped(const struct address *x)
{
	return !x->a[0] && !x->a[1] && x->a[2] == bpf_htonl(0xffff);
}

INLINE bool same(const struct address *x, const struct address *y)
{
	return x->a[0] == y->a[0] && x->a[1] == y->a[1] && x->a[2] == y->a[2] && x->a[3] == y->a[3];
}

INLINE bool loops(const struct address *x)
{
	if (mapped(x))
		return (bpf_ntohl(x->a[3]) >> 24) == 127;
	return !x->a[0] && !x->a[1] && !x->a[2] && x->a[3] == bpf_htonl(1);
}

/* cgroup_of gives the socket's cgroup, or 0 where it is not of this node. */
INLINE __u64 cgroup_of(struct sock *sk)
{
	struct cgroup *g = sk->sk_cgrp_data.cgroup;
	struct cgroup_subsys_state *css;
	__u64 id;

	if (!g || !g->kn)
		return 0;
	id = g->kn->id;
	if (!scope || id == scope)
		return id;
	/* As deep as user space looks for a cgroup's path. */
	for (int depth = 0; depth < 64; depth++) {
		css = g->self.parent;
		if (!css)
			return 0;
		g = css->cgroup;
		if (!g || !g->kn)
			return 0;
		if (g->kn->id == scope)
			return id;
	}
	return 0;
}

INLINE __u32 by_port(__u32 port)
{
	__u32 *class = bpf_map_lookup_elem(&ports, &port);

	return class ? *class : 0;
}

INLINE __u32 by_range(const struct address *remote)
{
	struct range r = { .bits = 128, .address = *remote };
	__u32 *class = bpf_map_lookup_elem(&ranges, &r);

	return class ? *class : 0;
}

enum side { CONNECTED, ACCEPTED, EITHER };

/* classify gives the class that mark, service port and address say; 0: none. */
INLINE __u32 classify(struct sock *sk, enum side side)
{
	__u32 class = 0;
	struct address remote;

	if (mark_base) {
		class = sk->sk_mark - mark_base;
		if (class >= 1 && class <= 5)
			return class;
		class = 0;
	}
	if (side != CONNECTED)
		class = by_port(sk->__sk_common.skc_num);
	if (!class && side != ACCEPTED)
		class = by_port(bpf_ntohs(sk->__sk_common.skc_dport));
	if (class)
		return class;
	remote_address(sk, &remote);
	return by_range(&remote);
}

#define SECOND 1000000000ULL

/* is_here remembers an address of this node, to the second. */
INLINE void is_here(const struct address *local, __u64 now)
{
	__u64 *last;

	if (loops(local))
		return;
	last = bpf_map_lookup_elem(&here, local);
	if (!last)
		bpf_map_update_elem(&here, local, &now, ANY);
	else if (*last + SECOND < now)
		*last = now;
}

/* was_here tells whether an address was this node's at a time, or after. Who
 * connects is seen before who accepts; they are not ten seconds apart. */
INLINE bool was_here(const struct address *remote, __u64 then)
{
	__u64 *last = bpf_map_lookup_elem(&here, remote);

	return last && *last + 10 * SECOND >= then;
}

/* settle decides how far the other end is. It is asked once that has answered:
 * then whoever accepted the connection on this node has been seen. */
INLINE __u8 settle(struct sock *sk, struct sock_state *st, struct tcp_sock *tp)
{
	struct address remote, local;
	struct end end = {};

	remote_address(sk, &remote);
	local_address(sk, &local);
	if (loops(&remote) || same(&remote, &local))
		return LOOPBACK;
	if (was_here(&remote, st->since))
		return SAME_NODE;
	end.address = local;
	/* skc_num is 0 once the socket is closed. */
	end.port = bpf_ntohs(tp->inet_conn.icsk_inet.inet_sport);
	end.first = st->first;
	return bpf_map_lookup_elem(&accepted, &end) ? SAME_NODE : OFF_NODE;
}

/* answered tells whether the other end has received or sent payload. */
INLINE bool answered(struct tcp_sock *tp)
{
	return tp->bytes_received || tp->bytes_acked > 1; /* one is the SYN */
}

INLINE void remember_ends(struct sock *sk, struct tcp_sock *tp, enum side side, __u64 now)
{
	struct address local;
	struct end end = {};
	__u32 one = 1;

	local_address(sk, &local);
	is_here(&local, now);
	if (side == CONNECTED)
		return;
	remote_address(sk, &end.address);
	end.port = bpf_ntohs(sk->__sk_common.skc_dport);
	end.first = tp->rcv_nxt - (__u32)tp->bytes_received;
	if (!loops(&end.address))
		bpf_map_update_elem(&accepted, &end, &one, ANY);
}

INLINE struct counts *slot(struct key *key)
{
	static const struct counts none;
	struct counts *c = bpf_map_lookup_elem(&acct, key);

	if (c)
		return c;
	/* Whoever is first makes it; an error means that another was, or that the
	 * map is full. */
	bpf_map_update_elem(&acct, key, &none, NOEXIST);
	c = bpf_map_lookup_elem(&acct, key);
	if (c)
		return c;
	note(KEY_LOST);
	/* User space makes these slots when it loads. */
	key->cgroup = 0;
	key->flight = 0;
	return bpf_map_lookup_elem(&acct, key);
}

/* sent_once gives how much payload was sent, each byte once. bytes_sent counts
 * one again that a queue of this node did not take at first, which is no repeat
 * to TCP; sequence numbers do not, and have 32 bits alone: the one tells how
 * often the other went round. */
INLINE __u64 sent_once(struct sock *sk, struct sock_state *st, struct tcp_sock *tp)
{
	__u64 about = tp->bytes_sent - tp->bytes_retrans;
	__u32 next = *(volatile __u32 *)&tp->snd_nxt, end = next - st->first;

	/* A FIN has a number of its own, the last. The state is ahead of it; whoever
	 * finds it gone was overtaken by the last take. */
	switch (sk->__sk_common.skc_state) {
	case FIN_WAIT1:
	case FIN_WAIT2:
	case TIME_WAIT:
	case LAST_ACK:
	case CLOSING:
		if (next == tp->write_seq)
			end--;
		break;
	case CLOSED:
		return st->sent;
	}
	return about + (long long)(int)(end - (__u32)about);
}

/* RISE makes a function that raises what was taken of a counter to what it says
 * now, and gives the difference: 0 where another took that much already. A try
 * that fails is one that another taker won; there are never more than a few. */
#define RISE(name, type, by)                                                  \
	INLINE type name(type *taken, type now)                               \
	{                                                                     \
		_Pragma("unroll") for (int i = 0; i < 6; i++)                 \
		{                                                             \
			type was = *(volatile type *)taken;                   \
			if ((by)(now - was) <= 0)                             \
				return 0;                                     \
			if (__sync_val_compare_and_swap(taken, was, now) == was) \
				return now - was;                             \
		}                                                             \
		return 0;                                                     \
	}
RISE(rise, __u64, long long)
RISE(rise32, __u32, int)

/* take adds what passed since the last take to the counts of the socket's key. */
INLINE void take(struct sock *sk, struct sock_state *st, struct tcp_sock *tp)
{
	__u64 sent, retransmitted, received;
	__u32 out, in, header, fin;
	struct address remote;
	struct key key = {};
	struct counts *c;

	if (!st->locality)
		st->locality = settle(sk, st, tp);
	/* The flag comes after the byte: who sees it counts both. */
	fin = done(sk);
	sent = sent_once(sk, st, tp);
	retransmitted = tp->bytes_retrans;
	received = tp->bytes_received;
	out = tp->segs_out;
	in = tp->segs_in;
	sent = rise(&st->sent, sent);
	retransmitted = rise(&st->retransmitted, retransmitted);
	received = rise(&st->received, received);
	out = rise32(&st->segs_out, out);
	in = rise32(&st->segs_in, in);
	/* May be -1, where the walk before took the byte and did not know. */
	received -= rise32(&st->fin, fin);
	if (!sent && !received && !out && !in && !retransmitted)
		return;
	key.cgroup = st->cgroup;
	key.flight = st->flight;
	key.class = st->class;
	key.locality = st->locality;
	key.transport = TCP;
	c = slot(&key);
	if (!c)
		return;
	remote_address(sk, &remote);
	header = ETH_HLEN_ + (mapped(&remote) ? 20 : 40) + tp->tcp_header_len;
	__sync_fetch_and_add(&c->received, received);
	__sync_fetch_and_add(&c->transmitted_all, sent + retransmitted);
	__sync_fetch_and_add(&c->retransmitted, retransmitted);
	__sync_fetch_and_add(&c->received_headers, (__u64)in * header);
	__sync_fetch_and_add(&c->transmitted_headers, (__u64)out * header);
}

/* peek fills a row with what a take would find, and says whether that is payload. */
INLINE bool peek(struct sock *sk, struct sock_state *st, struct tcp_sock *tp, struct row *row)
{
	row->received = tp->bytes_received - st->received - (done(sk) - st->fin);
	row->retransmitted = tp->bytes_retrans - st->retransmitted;
	row->transmitted = sent_once(sk, st, tp) - st->sent;
	if (!row->received && !row->transmitted && !row->retransmitted)
		return 0;
	if (!st->locality)
		st->locality = settle(sk, st, tp);
	row->cgroup = st->cgroup;
	row->srtt_us = tp->srtt_us >> 3;
	row->class = st->class;
	row->locality = st->locality;
	return 1;
}

INLINE bool internet(struct sock *sk)
{
	return sk->__sk_common.skc_family == AF_INET || sk->__sk_common.skc_family == AF_INET6;
}

SEC("tp_btf/inet_sock_set_state")
int sock_set_state(__u64 *ctx)
{
	struct sock *sk = (struct sock *)ctx[0];
	int oldstate = ctx[1], newstate = ctx[2];
	enum side side = oldstate == SYN_SENT ? CONNECTED : ACCEPTED;
	struct sock_state *st, fresh = {};
	struct tcp_sock *tp;
	__u64 cgroup, now;

	if (sk->sk_protocol != IPPROTO_TCP_ || !internet(sk))
		return 0;
	if (newstate == CLOSED) {
		st = bpf_sk_storage_get(&socks, sk, 0, 0);
		tp = bpf_skc_to_tcp_sock(sk);
		if (st && tp && st->state == OPEN) {
			take(sk, st, tp);
			st->state = SHUT;
		}
		return 0;
	}
	if (newstate != ESTABLISHED)
		return 0;
	cgroup = cgroup_of(sk);
	tp = bpf_skc_to_tcp_sock(sk);
	if (!cgroup || !tp)
		return 0;
	st = bpf_sk_storage_get(&socks, sk, &fresh, STORAGE_CREATE);
	if (!st) {
		note(UNTRACKED);
		return 0;
	}
	if (st->state == OPEN)
		return 0; /* another program of ours was first */
	/* A socket may be connected again after it was shut; its counters began anew. */
	st->sent = st->retransmitted = st->received = 0;
	st->segs_out = st->segs_in = st->fin = 0;
	st->first = tp->snd_nxt - (__u32)(tp->bytes_sent - tp->bytes_retrans);
	st->locality = UNSETTLED;
	st->cgroup = cgroup;
	if (!st->class)
		st->class = classify(sk, side);
	now = bpf_ktime_get_ns();
	st->since = now;
	remember_ends(sk, tp, side, now);
	st->state = OPEN;
	note(SEEN);
	return 0;
}

/* walk takes what passed on every socket of every network namespace. */
SEC("iter/bpf_sk_storage_map")
int walk(struct bpf_iter__bpf_sk_storage_map *ctx)
{
	struct sock *sk = ctx->sk;
	struct sock_state *st;
	struct tcp_sock *tp;
	struct row row = {};

	if (!sk || !ctx->value)
		return 0;
	st = bpf_sk_storage_get(&socks, sk, 0, 0);
	tp = bpf_skc_to_tcp_sock(sk);
	if (!st || !tp || st->state != OPEN || (!st->locality && !answered(tp)))
		return 0;
	/* Where the row finds no room the kernel asks for this socket again, once
	 * there is: what was taken until then would have no row. */
	if (rows && peek(sk, st, tp, &row) && bpf_seq_write(ctx->meta->seq, &row, sizeof(row)))
		return 0;
	take(sk, st, tp);
	return 0;
}

/* seed begins with the sockets that were there before: what passed on them so
 * far is nobody's. */
SEC("iter/task_file")
int seed(struct bpf_iter__task_file *ctx)
{
	struct file *file = ctx->file;
	struct sock_state *st, fresh = {};
	struct tcp_sock *tp;
	struct socket *socket;
	struct sock *sk;
	__u64 cgroup, now;
	__u8 state;

	if (!file)
		return 0;
	socket = bpf_sock_from_file(file);
	if (!socket)
		return 0;
	sk = socket->sk;
	if (!sk || !internet(sk) || sk->sk_protocol != IPPROTO_TCP_)
		return 0;
	state = sk->__sk_common.skc_state;
	if (state == SYN_SENT || state == SYN_RECV || state == CLOSED || state == LISTEN)
		return 0;
	cgroup = cgroup_of(sk);
	if (!cgroup)
		return 0;
	tp = bpf_skc_to_tcp_sock(sk);
	if (!tp)
		return 0;
	fresh.fin = done(sk);
	fresh.retransmitted = tp->bytes_retrans;
	fresh.sent = tp->bytes_sent - fresh.retransmitted;
	fresh.first = tp->snd_nxt - (__u32)fresh.sent;
	fresh.received = tp->bytes_received;
	fresh.segs_out = tp->segs_out;
	fresh.segs_in = tp->segs_in;
	/* Which end is taken in first is chance; a minute covers all of it. */
	now = bpf_ktime_get_ns();
	fresh.since = now > 60 * SECOND ? now - 60 * SECOND : 0;
	fresh.cgroup = cgroup;
	fresh.class = classify(sk, EITHER);
	fresh.state = OPEN;
	if (bpf_sk_storage_get(&socks, sk, 0, 0))
		return 0; /* known: its counts go on */
	st = bpf_sk_storage_get(&socks, sk, &fresh, STORAGE_CREATE);
	if (!st) {
		note(UNTRACKED);
		return 0;
	}
	remember_ends(sk, tp, EITHER, now);
	note(SEEDED);
	return 0;
}

/* datagram counts a packet of any protocol but TCP that a socket sends or gets:
 * payload is what follows the headers of IP and UDP. It always lets it pass. */
INLINE int datagram(struct __sk_buff *skb, bool out)
{
	struct address local = {}, remote = {};
	__u64 now = bpf_ktime_get_ns(), while_ago = now > 600 * SECOND ? now - 600 * SECOND : 0;
	__u32 header, payload;
	__u16 ports_of[2] = {};
	struct key key = {};
	struct counts *c;
	__u8 ip[40], protocol;

	if (bpf_skb_load_bytes(skb, 0, ip, 20))
		return 1;
	if (ip[0] >> 4 == 4) {
		protocol = ip[9];
		if (protocol == IPPROTO_TCP_)
			return 1;
		header = (ip[0] & 15) * 4;
		local.a[2] = remote.a[2] = bpf_htonl(0xffff);
		local.a[3] = *(__u32 *)(ip + (out ? 12 : 16));
		remote.a[3] = *(__u32 *)(ip + (out ? 16 : 12));
	} else {
		protocol = ip[6];
		if (protocol == IPPROTO_TCP_ || bpf_skb_load_bytes(skb, 0, ip, 40))
			return 1;
		header = 40;
		__builtin_memcpy(&local, ip + (out ? 8 : 24), 16);
		__builtin_memcpy(&remote, ip + (out ? 24 : 8), 16);
	}
	if (protocol == IPPROTO_UDP_ && !bpf_skb_load_bytes(skb, header, ports_of, 4)) {
		__u32 mine = bpf_ntohs(ports_of[out ? 0 : 1]), theirs = bpf_ntohs(ports_of[out ? 1 : 0]);

		key.class = by_port(mine);
		if (!key.class)
			key.class = by_port(theirs);
		header += 8;
	}
	if (!key.class)
		key.class = by_range(&remote);
	payload = skb->len > header ? skb->len - header : 0;
	if (loops(&remote) || same(&remote, &local))
		key.locality = LOOPBACK;
	else if (was_here(&remote, while_ago))
		key.locality = SAME_NODE;
	else
		key.locality = OFF_NODE;
	/* Whoever only receives has its address from a packet that was for it alone. */
	if (out || skb->pkt_type == PACKET_HOST_)
		is_here(&local, now);
	key.cgroup = bpf_skb_cgroup_id(skb);
	key.transport = NON_TCP;
	c = slot(&key);
	if (!c)
		return 1;
	if (out) {
		__sync_fetch_and_add(&c->transmitted_all, payload);
		__sync_fetch_and_add(&c->transmitted_headers, skb->len - payload + ETH_HLEN_);
	} else {
		__sync_fetch_and_add(&c->received, payload);
		__sync_fetch_and_add(&c->received_headers, skb->len - payload + ETH_HLEN_);
	}
	return 1;
}

SEC("cgroup_skb/egress")
int datagram_out(struct __sk_buff *skb)
{
	return datagram(skb, 1);
}

SEC("cgroup_skb/ingress")
int datagram_in(struct __sk_buff *skb)
{
	return datagram(skb, 0);
}
