package nodeagent

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/hearth-dev/hearth/kvtier/peer"
)

// Metrics of the blocks between nodes. The label peer has the names of kv.peers.
var (
	descPeerWire      = desc("kv_peer_bytes_total", "Bytes on the wire between this node and KV peers: as caller or server.", "class", "side", "direction")
	descPeerQuestions = desc("kv_peer_questions_total", "Questions which peer has a block: found, absent, or unanswered.", "result")
	descPeerBlocks    = desc("kv_peer_blocks_total", "Blocks that came from a peer, verified.", "peer")
	descPeerBytes     = desc("kv_peer_block_bytes_total", "Bytes of blocks that came from a peer.", "peer")
	descPeerSaved     = desc("kv_peer_saved_tokens_total", "Tokens of blocks that came from peers, where their number is known.")
	descPeerLost      = desc("kv_peer_lost_total", "Blocks that a peer has and that did not come: absent (gone since), damaged (not what was stored), failed (cut off), gated (computed sooner), full (too many in the row), no_room (in RAM here).", "reason")
	descPeerWaits     = desc("kv_peer_waits_total", "Reads that waited for a block on its way: come, or late where they gave up.", "result")
	descPeerAwaited   = desc("kv_peer_awaited_bytes", "Bytes of blocks that peers were asked for and that have not come.")
	descPeerUp        = desc("kv_peer_up", "1 where a peer is asked: it is of a right zone and has not failed just now.", "peer")
	descPeerFailures  = desc("kv_peer_failures_total", "Exchanges with a peer that failed.", "peer")
	descPeerDamaged   = desc("kv_peer_damaged_total", "Those of them where it sent what it should not.", "peer")
	descPeerSpeed     = desc("kv_peer_bandwidth_bytes", "Bytes a second that a peer is taken to send.", "peer")

	descPeerConns   = desc("kv_peer_server_connections", "Connections of other nodes.")
	descPeerCallers = desc("kv_peer_server_callers_total", "Connections of other nodes: accepted, refused beyond a bound, strangers without an agent's certificate or hello, protocol where one sent what it should not, slow where it did not take its blocks.", "result")
	descPeerAsked   = desc("kv_peer_server_questions_total", "Questions of other nodes for a block: found here, or absent.", "result")
	descPeerGiven   = desc("kv_peer_server_blocks_total", "Blocks that other nodes asked for: given, or absent.", "result")
	descPeerGiveLen = desc("kv_peer_server_block_bytes_total", "Bytes of blocks given to other nodes.")
)

var kvPeerDescs = []*prometheus.Desc{
	descPeerWire, descPeerQuestions, descPeerBlocks, descPeerBytes, descPeerSaved, descPeerLost, descPeerWaits, descPeerAwaited, descPeerUp,
	descPeerFailures, descPeerDamaged, descPeerSpeed, descPeerConns, descPeerCallers, descPeerAsked, descPeerGiven, descPeerGiveLen,
}

// collect tells of the blocks between nodes; nothing where there are none.
func (p kvPeering) collect(gauge gaugeFunc, counter counterFunc) {
	if p.peers != nil {
		s := p.peers.Stats()
		counter(descPeerWire, s.BytesIn, peer.Class, "caller", "in")
		counter(descPeerWire, s.BytesOut, peer.Class, "caller", "out")
		counter(descPeerQuestions, s.Found, "found")
		counter(descPeerQuestions, s.NotFound, "absent")
		counter(descPeerQuestions, s.Unanswered, "unanswered")
		counter(descPeerSaved, s.Tokens)
		for reason, n := range map[string]int64{
			"absent": s.Absent, "damaged": s.Damaged, "failed": s.Failed, "gated": s.Gated, "full": s.Full, "no_room": s.NoRoom,
		} {
			counter(descPeerLost, n, reason)
		}
		counter(descPeerWaits, s.Waited, "come")
		counter(descPeerWaits, s.WaitedOut, "late")
		gauge(descPeerAwaited, float64(s.Awaited))
		for _, one := range s.Peers {
			counter(descPeerBlocks, one.Blocks, one.Name)
			counter(descPeerBytes, one.BlockBytes, one.Name)
			gauge(descPeerUp, number(one.Asked), one.Name)
			counter(descPeerFailures, one.Failures, one.Name)
			counter(descPeerDamaged, one.Damaged, one.Name)
			gauge(descPeerSpeed, one.Speed.Bandwidth, one.Name)
		}
	}
	if p.server == nil {
		return
	}
	s := p.server.Stats()
	counter(descPeerWire, s.BytesIn, peer.Class, "server", "in")
	counter(descPeerWire, s.BytesOut, peer.Class, "server", "out")
	gauge(descPeerConns, float64(s.Connections))
	for result, n := range map[string]int64{
		"accepted": s.Accepted, "refused": s.Refused, "strangers": s.Strangers, "protocol": s.Protocol, "slow": s.Slow,
	} {
		counter(descPeerCallers, n, result)
	}
	counter(descPeerAsked, s.Found, "found")
	counter(descPeerAsked, s.NotFound, "absent")
	counter(descPeerGiven, s.Blocks, "given")
	counter(descPeerGiven, s.Absent, "absent")
	counter(descPeerGiveLen, s.BlockBytes)
}
