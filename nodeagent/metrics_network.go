package nodeagent

import (
	"github.com/prometheus/client_golang/prometheus"

	"github.com/hearth-dev/hearth/nodeagent/netattr"
	"github.com/hearth-dev/hearth/nodeagent/netattr/nic"
	"github.com/hearth-dev/hearth/nodeagent/netattr/traffic"
	"github.com/hearth-dev/hearth/nodeagent/scaleout"
)

// Metrics of the network. No label is an address, a port, a cgroup, a pull or an
// artifact; pods have at most 64 series for each class and direction, and their
// names are in a metric to join with.
var (
	descNetBytes    = desc("net_bytes_total", "Payload by class, each byte once. Only locality off_node passes the network devices.", "class", "direction", "locality", "transport")
	descNetRepeated = desc("net_retransmitted_bytes_total", "Payload that TCP sent again.", "class", "locality")
	descNetHeaders  = desc("net_header_bytes_total", "Headers of what passed the network devices, as the sockets tell.", "direction")
	descNetDevice   = desc("net_device_bytes_total", "What a network device counted since the agent started.", "device", "direction")
	descNetDropped  = desc("net_device_dropped_total", "Packets that a network device or its driver dropped.", "device", "direction")
	descNetRDMA     = desc("net_rdma_bytes_total", "What a port of RDMA counted since the agent started; no part of net_device_bytes_total.", "port", "direction")
	descNetNobodys  = desc("net_unattributed_bytes_total", "What the network devices counted since the agent started and no owner is known of.", "direction")
	descNetResidual = desc("net_residual_bytes", "Devices less owners at the last sample, before it is made a counter; negative where headers are over-estimated.", "direction")
	descNetPod      = desc("net_pod_bytes_total", "Payload by pod, since it has series of its own; join with net_pod_info by pod_uid. other is all pods without.", "pod_uid", "class", "direction")
	descNetPodInfo  = desc("net_pod_info", "The pods of net_pod_bytes_total, always 1.", "pod_uid", "namespace", "pod")
	descNetSight    = desc("net_sight", "1 for how much of the network is seen: none, devices, partial, full.", "sight")
	descNetSensor   = desc("net_sensor_up", "1 where a sensor works, 0 where it is wanted and does not.", "sensor")
	descNetSeen     = desc("net_connections_total", "TCP connections: tracked from their begin, seeded where they were there before, untracked where there was no memory for it, missed at most where the kernel left out their begin or end.", "how")
	descNetKeysLost = desc("net_keys_lost_total", "Takes counted without their owner because the table of owners was full.")
	descNetTag      = desc("net_tag_failed_total", "Sockets of the agent that could not be marked with their class.")
	descNetLiveN    = desc("net_live_connections", "Connections of class serving on which payload passed in the last interval.")
	descNetLiveRTT  = desc("net_live_rtt_seconds", "Smoothed round trips of those connections.", "quantile")
	descNetWalk     = desc("net_walk_seconds", "How long the last walk over all sockets took.")
	descScaleOuts   = desc("scaleouts", "Scale-outs that run, and those that are remembered after their end.", "state")
)

var networkDescs = []*prometheus.Desc{
	descNetBytes, descNetRepeated, descNetHeaders, descNetDevice, descNetDropped, descNetRDMA, descNetNobodys, descNetResidual, descNetPod, descNetPodInfo,
	descNetSight, descNetSensor, descNetSeen, descNetKeysLost, descNetTag, descNetLiveN, descNetLiveRTT, descNetWalk, descScaleOuts,
}

// collect tells of the network. What is not seen has no sample: an absent number
// is not 0.
func (n *network) collect(gauge gaugeFunc, counter counterFunc) {
	s := n.collector.Snapshot()
	for _, sight := range []netattr.Sight{netattr.SightNone, netattr.SightDevices, netattr.SightPartial, netattr.SightFull} {
		gauge(descNetSight, number(sight == s.Sight), sight.String())
	}
	for _, sensor := range s.Sensors {
		if sensor.Wanted {
			gauge(descNetSensor, number(sensor.On), sensor.Name)
		}
	}
	n.devices(s, gauge, counter)
	if s.Sight >= netattr.SightPartial {
		n.owners(s, gauge, counter)
	}
	states := map[string]int{scaleout.StateRunning: 0, scaleout.StateReady: 0, scaleout.StateFailed: 0}
	for _, r := range n.scaleouts.List() {
		states[r.State]++
	}
	for state, count := range states {
		gauge(descScaleOuts, float64(count), state)
	}
}

var directions = []traffic.Direction{traffic.Receive, traffic.Transmit}

func (n *network) devices(s *netattr.Snapshot, gauge gaugeFunc, counter counterFunc) {
	for name, counted := range s.Counted.Devices {
		for _, one := range []struct {
			desc      *prometheus.Desc
			what      nic.Counter
			direction traffic.Direction
		}{
			{descNetDevice, nic.ReceivedBytes, traffic.Receive},
			{descNetDevice, nic.TransmittedBytes, traffic.Transmit},
			{descNetDropped, nic.ReceiveDrops, traffic.Receive},
			{descNetDropped, nic.TransmitDrops, traffic.Transmit},
		} {
			if n, told := counted[one.what]; told {
				counter(one.desc, int64(n), name, one.direction.String())
			}
		}
	}
	for name, counted := range s.Counted.Ports {
		for what, direction := range map[nic.Counter]traffic.Direction{nic.ReceivedBytes: traffic.Receive, nic.TransmittedBytes: traffic.Transmit} {
			if n, told := counted[what]; told {
				counter(descNetRDMA, int64(n), name, direction.String())
			}
		}
	}
	if len(s.Devices.Net) == 0 {
		return
	}
	for _, direction := range directions {
		counter(descNetNobodys, int64(s.Unattributed[direction]), direction.String())
		gauge(descNetResidual, float64(s.Residual[direction]), direction.String())
	}
}

func (n *network) owners(s *netattr.Snapshot, gauge gaugeFunc, counter counterFunc) {
	var headers [2]uint64
	repeated := map[[2]string]uint64{}
	for _, kind := range s.Kinds() {
		c := s.Totals[kind]
		class, locality, transport := kind.Class.String(), kind.Locality.String(), kind.Transport.String()
		counter(descNetBytes, int64(c.Received), class, traffic.Receive.String(), locality, transport)
		counter(descNetBytes, int64(c.Transmitted), class, traffic.Transmit.String(), locality, transport)
		repeated[[2]string{class, locality}] += c.Retransmitted
		if kind.Locality == traffic.OffNode {
			headers[traffic.Receive] += c.ReceivedHeaders
			headers[traffic.Transmit] += c.TransmittedHeaders
		}
	}
	for labels, bytes := range repeated {
		counter(descNetRepeated, int64(bytes), labels[0], labels[1])
	}
	for _, direction := range directions {
		counter(descNetHeaders, int64(headers[direction]), direction.String())
	}
	for uid, of := range n.pods.look(s) {
		for kind, bytes := range of {
			counter(descNetPod, int64(bytes), uid, kind.class.String(), kind.direction.String())
		}
		if p, known := s.Pods[uid]; known {
			gauge(descNetPodInfo, 1, uid, p.Namespace, p.Name)
		}
	}
	counter(descNetSeen, int64(s.Status.Seen), "tracked")
	counter(descNetSeen, int64(s.Status.Seeded), "seeded")
	counter(descNetSeen, int64(s.Status.Untracked), "untracked")
	counter(descNetSeen, int64(s.Status.Missed), "missed")
	counter(descNetKeysLost, int64(s.Status.KeyLost))
	counter(descNetTag, int64(s.TagFailed))
	gauge(descNetLiveN, float64(s.Live.Connections))
	if s.Live.Connections > 0 {
		for text, q := range map[string]float64{"0.5": 0.5, "0.9": 0.9, "0.99": 0.99} {
			gauge(descNetLiveRTT, s.Live.RTT.Quantile(q).Seconds(), text)
		}
	}
	gauge(descNetWalk, s.Walked.Seconds())
}
