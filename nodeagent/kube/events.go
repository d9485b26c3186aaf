package kube

import (
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	resourceapi "k8s.io/api/resource/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/validation"

	"github.com/hearth-dev/hearth/dradriver"
)

// maxMessage bounds the text of an event, in bytes, as the API does.
const maxMessage = 1024

// Kinds of what an event is about.
const (
	KindClaim = "ResourceClaim"
	KindPod   = "Pod"
	KindNode  = "Node"
)

func reference(o dradriver.Object) corev1.ObjectReference {
	version := corev1.SchemeGroupVersion.String()
	if o.Kind == KindClaim {
		version = resourceapi.SchemeGroupVersion.String()
	}
	return corev1.ObjectReference{Kind: o.Kind, APIVersion: version, Namespace: o.Namespace, Name: o.Name, UID: types.UID(o.UID)}
}

// Event tells people of an object, as `kubectl describe` shows it: reason is a
// CamelCase token, message one sentence. It never blocks: the event is sent in
// the background, counted with equal ones, merged with ones that differ in
// their message only, and dropped where too many are about one object.
func (c *Client) Event(about dradriver.Object, warning bool, reason, message string) {
	now := metav1.Now()
	kind := corev1.EventTypeNormal
	if warning {
		kind = corev1.EventTypeWarning
	}
	namespace := about.Namespace
	if namespace == "" {
		namespace = metav1.NamespaceDefault
	}
	event := &corev1.Event{
		ObjectMeta: metav1.ObjectMeta{
			Name: eventName(about.Name, time.Now()), Namespace: namespace,
		},
		InvolvedObject: reference(about), Reason: reason, Message: cut(message, maxMessage), Type: kind,
		FirstTimestamp: now, LastTimestamp: now, Count: 1,
		Source:              corev1.EventSource{Component: dradriver.Name, Host: c.opts.Node},
		ReportingController: dradriver.Name, ReportingInstance: c.opts.Node,
	}
	result, err := c.events.EventCorrelate(event)
	if err != nil || result.Skip {
		return
	}
	event = result.Event
	// Equal ones share a key: the later has the higher count.
	key := fmt.Sprintf("event/%s/%s/%s/%s", namespace, about.UID, reason, event.Name)
	if !c.queue.add(key, "send event", func(ctx context.Context) error { return c.sendEvent(ctx, event, result.Patch) }) {
		c.opts.Log.Warn("event dropped, the queue is full", slog.String("reason", reason), slog.String("object", about.Name))
	}
}

// eventName names an event after what it is about. Both names have at most 253
// bytes, so that of a long one only the beginning is taken.
func eventName(about string, at time.Time) string {
	stamp := "." + strconv.FormatInt(at.UnixNano(), 16)
	about = about[:min(len(about), validation.DNS1123SubdomainMaxLength-len(stamp))]
	return strings.TrimRight(about, "-.") + stamp
}

func (c *Client) sendEvent(ctx context.Context, event *corev1.Event, patch []byte) error {
	events := c.opts.Client.CoreV1().Events(event.Namespace)
	var stored *corev1.Event
	var err error
	if event.Count > 1 && len(patch) > 0 {
		stored, err = events.Patch(ctx, event.Name, types.StrategicMergePatchType, patch, metav1.PatchOptions{})
	}
	if event.Count <= 1 || len(patch) == 0 || apierrors.IsNotFound(err) {
		fresh := event.DeepCopy()
		fresh.ResourceVersion = ""
		stored, err = events.Create(ctx, fresh, metav1.CreateOptions{})
	}
	if err == nil {
		c.events.UpdateState(stored)
		return nil
	}
	if apierrors.IsAlreadyExists(err) {
		return nil // a try whose answer was lost
	}
	return final(err)
}

// final marks what the API server will refuse the next time too: the object is
// gone, or what was sent is invalid. A missing right may be given later.
func final(err error) error {
	if apierrors.IsNotFound(err) || apierrors.IsInvalid(err) || apierrors.IsBadRequest(err) ||
		apierrors.HasStatusCause(err, corev1.NamespaceTerminatingCause) {
		return fmt.Errorf("%w: %w", errFinal, err)
	}
	return err
}

// cut shortens a text to at most limit bytes at the end of a rune.
func cut(text string, limit int) string {
	if len(text) <= limit {
		return text
	}
	const more = "..."
	end := limit - len(more)
	for end > 0 && text[end]&0xc0 == 0x80 {
		end--
	}
	return text[:end] + more
}
