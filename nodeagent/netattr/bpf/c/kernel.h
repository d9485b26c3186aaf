/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The few fields of the kernel's types that netattr.bpf.c reads. The loader
 * finds each by name in the running kernel's BTF (CO-RE), so order and padding
 * here mean nothing; a field that a kernel lacks stops the one program that
 * reads it. Nothing is read by bpf_probe_read: under lockdown=confidentiality
 * the kernel refuses that helper, and a read through a BTF pointer it allows.
 */
#pragma once

typedef unsigned char __u8;
typedef unsigned short __u16;
typedef unsigned int __u32;
typedef unsigned long long __u64;
typedef __u16 __be16;
typedef __u32 __be32;
typedef _Bool bool;

#define SEC(name) __attribute__((section(name), used))
#define INLINE static __attribute__((always_inline)) inline
#define bpf_ntohs __builtin_bswap16 /* the object is little-endian */
#define bpf_ntohl __builtin_bswap32
#define bpf_htonl __builtin_bswap32

/* How libbpf and cilium/ebpf find the maps of an object. */
#define __uint(name, val) int(*name)[val]
#define __type(name, val) typeof(val) *name

/* Of include/uapi/linux/bpf.h; the numbers are the kernel's interface. */
enum {
	MAP_HASH = 1,
	MAP_ARRAY = 2,
	MAP_LRU_HASH = 9,
	MAP_LPM_TRIE = 11,
	MAP_SK_STORAGE = 24,
	F_NO_PREALLOC = 1 << 0,
	F_CLONE = 1 << 9,
	ANY = 0,
	NOEXIST = 1,
	STORAGE_CREATE = 1 << 0,
};

struct sock;
struct socket;
struct tcp_sock;
struct file;
struct seq_file;

struct __sk_buff {
	__u32 len; /* from the network header on, where cgroup programs see it */
	__u32 pkt_type;
};

static void *(*bpf_map_lookup_elem)(void *map, const void *key) = (void *)1;
static long (*bpf_map_update_elem)(void *map, const void *key, const void *value, __u64 flags) = (void *)2;
static __u64 (*bpf_ktime_get_ns)(void) = (void *)5;
static long (*bpf_skb_load_bytes)(const struct __sk_buff *skb, __u32 offset, void *to, __u32 len) = (void *)26;
static __u64 (*bpf_skb_cgroup_id)(struct __sk_buff *skb) = (void *)79;
static void *(*bpf_sk_storage_get)(void *map, void *sk, void *value, __u64 flags) = (void *)107;
static long (*bpf_seq_write)(struct seq_file *m, const void *data, __u32 len) = (void *)127;
static struct tcp_sock *(*bpf_skc_to_tcp_sock)(void *sk) = (void *)137;
static struct socket *(*bpf_sock_from_file)(struct file *file) = (void *)162;

#pragma clang attribute push(__attribute__((preserve_access_index)), apply_to = record)

struct kernfs_node {
	__u64 id;
};

struct cgroup;

struct cgroup_subsys_state {
	struct cgroup *cgroup;
	struct cgroup_subsys_state *parent;
};

struct cgroup {
	struct cgroup_subsys_state self;
	struct kernfs_node *kn;
};

struct sock_cgroup_data {
	struct cgroup *cgroup; /* from 5.15 */
};

struct in6_addr {
	union {
		__u8 u6_addr8[16];
		__be32 u6_addr32[4];
	} in6_u;
};

struct sock_common {
	__be32 skc_daddr;
	__be32 skc_rcv_saddr;
	__be16 skc_dport;
	__u16 skc_num;
	unsigned short skc_family;
	volatile unsigned char skc_state;
	struct in6_addr skc_v6_daddr;
	struct in6_addr skc_v6_rcv_saddr;
	unsigned long skc_flags;
};

struct sock {
	struct sock_common __sk_common;
	__u32 sk_mark;
	__u16 sk_protocol;
	struct sock_cgroup_data sk_cgrp_data;
};

struct inet_sock {
	__be16 inet_sport;
};

struct inet_connection_sock {
	struct inet_sock icsk_inet;
};

struct tcp_sock {
	struct inet_connection_sock inet_conn;
	__u16 tcp_header_len;
	__u32 segs_in;
	__u32 segs_out;
	__u32 rcv_nxt;
	__u32 snd_nxt;
	__u32 write_seq;
	__u64 bytes_received;
	__u64 bytes_sent;
	__u64 bytes_retrans;
	__u64 bytes_acked;
	__u32 srtt_us;
};

struct socket {
	struct sock *sk;
};

struct task_struct;

struct bpf_iter_meta {
	struct seq_file *seq;
};

struct bpf_map;

struct bpf_iter__bpf_sk_storage_map {
	struct bpf_iter_meta *meta;
	struct bpf_map *map;
	struct sock *sk;
	void *value;
};

struct bpf_iter__task_file {
	struct bpf_iter_meta *meta;
	struct task_struct *task;
	__u32 fd;
	struct file *file;
};

#pragma clang attribute pop

enum {
	AF_INET = 2,
	AF_INET6 = 10,
	IPPROTO_TCP_ = 6,
	IPPROTO_UDP_ = 17,
	ETH_HLEN_ = 14,
	SOCK_DONE_ = 1, /* enum sock_flags: the other side's FIN was received */
	PACKET_HOST_ = 0, /* not a broadcast, not a multicast */
};

/* include/net/tcp_states.h */
enum {
	ESTABLISHED = 1,
	SYN_SENT = 2,
	SYN_RECV = 3,
	FIN_WAIT1 = 4,
	FIN_WAIT2 = 5,
	TIME_WAIT = 6,
	CLOSED = 7,
	LAST_ACK = 9,
	LISTEN = 10,
	CLOSING = 11,
	NEW_SYN_RECV = 12,
};
