// The search runs in a worker, and browsers refuse workers on file://: there, run its script in a hidden frame instead.
// mkdocs-material recognises this file by its name and adds no script from the Internet for the same purpose.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      const frame = document.createElement("iframe");
      frame.hidden = true;
      // Within the frame postMessage would post to the frame itself: the worker means its owner.
      frame.srcdoc =
        "<script>postMessage = (data) => frameElement.dispatchEvent(new MessageEvent('reply', { data }))</" + "script>" +
        `<script src="${url}"></` + "script>";
      frame.addEventListener("load", () => {
        this.frame = frame;
        this.waiting.splice(0).forEach((data) => this.postMessage(data));
      });
      frame.addEventListener("reply", ({ data }) => {
        const message = new MessageEvent("message", { data });
        this.dispatchEvent(message);
        this.onmessage?.(message);
      });
      document.body.append(frame);
    }

    postMessage(data) {
      if (this.frame) {
        this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }));
      } else {
        this.waiting.push(data);
      }
    }
  };
}
