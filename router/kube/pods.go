package kube

import (
	"cmp"
	"net"
	"slices"
	"strconv"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"github.com/hearth-dev/hearth/router/pool"
)

// stripPod keeps of a pod what podsOf reads, so that a thousand pods take about
// a megabyte, whatever they say of themselves.
func stripPod(object any) (any, error) {
	pod, ok := object.(*corev1.Pod)
	if !ok {
		return object, nil
	}
	kept := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{
			Namespace: pod.Namespace, Name: pod.Name, UID: pod.UID, ResourceVersion: pod.ResourceVersion, DeletionTimestamp: pod.DeletionTimestamp,
		},
		Spec:   corev1.PodSpec{NodeName: pod.Spec.NodeName},
		Status: corev1.PodStatus{Phase: pod.Status.Phase, PodIP: pod.Status.PodIP},
	}
	for _, list := range [][]corev1.Container{pod.Spec.Containers, pod.Spec.InitContainers} {
		for i := range list {
			if len(list[i].Ports) > 0 {
				kept.Spec.Containers = append(kept.Spec.Containers, corev1.Container{Name: list[i].Name, Ports: list[i].Ports})
			}
		}
	}
	for _, condition := range pod.Status.Conditions {
		if condition.Type == corev1.PodReady {
			kept.Status.Conditions = []corev1.PodCondition{{Type: condition.Type, Status: condition.Status}}
		}
	}
	for _, list := range [][]corev1.ContainerStatus{pod.Status.ContainerStatuses, pod.Status.InitContainerStatuses} {
		for i := range list {
			kept.Status.ContainerStatuses = append(kept.Status.ContainerStatuses,
				corev1.ContainerStatus{Name: list[i].Name, RestartCount: list[i].RestartCount})
		}
	}
	return kept, nil
}

// podsOf gives the pods that may be endpoints, sorted by namespace and name,
// and the names of those that would be if they had the port.
func podsOf(objects []any, port string) (pods []pool.Pod, odd []string) {
	for _, object := range objects {
		pod, ok := object.(*corev1.Pod)
		if !ok || pod.Status.PodIP == "" || pod.Status.Phase == corev1.PodSucceeded || pod.Status.Phase == corev1.PodFailed {
			continue
		}
		number, container := portOf(pod, port)
		if number == 0 {
			odd = append(odd, pod.Namespace+"/"+pod.Name)
			continue
		}
		pods = append(pods, pool.Pod{
			UID: string(pod.UID), Namespace: pod.Namespace, Name: pod.Name, Node: pod.Spec.NodeName,
			URL:   "http://" + net.JoinHostPort(pod.Status.PodIP, strconv.Itoa(number)),
			Ready: isReady(pod), Leaving: pod.DeletionTimestamp != nil, Restarts: restarts(pod, container),
		})
	}
	slices.SortFunc(pods, func(a, b pool.Pod) int {
		return cmp.Or(cmp.Compare(a.Namespace, b.Namespace), cmp.Compare(a.Name, b.Name))
	})
	slices.Sort(odd)
	return pods, odd
}

// portOf finds a port by its name or number, and the container that declares
// it. A number need not be declared: the container is then unknown.
func portOf(pod *corev1.Pod, port string) (number int, container string) {
	number, err := strconv.Atoi(port)
	named := err != nil
	for _, c := range pod.Spec.Containers {
		for _, p := range c.Ports {
			if p.Protocol != corev1.ProtocolTCP && p.Protocol != "" {
				continue
			}
			if named && p.Name == port || !named && int(p.ContainerPort) == number {
				return int(p.ContainerPort), c.Name
			}
		}
	}
	if named {
		return 0, ""
	}
	return number, ""
}

func isReady(pod *corev1.Pod) bool {
	return slices.ContainsFunc(pod.Status.Conditions, func(c corev1.PodCondition) bool {
		return c.Type == corev1.PodReady && c.Status == corev1.ConditionTrue
	})
}

// restarts counts those of the engine's container, or of all where it is unknown.
func restarts(pod *corev1.Pod, container string) int {
	n := 0
	for _, s := range pod.Status.ContainerStatuses {
		if container == "" || s.Name == container {
			n += int(s.RestartCount)
		}
	}
	return n
}
